"""What eager code keeps of gathered buffers from forward to backward, where a unit reshards to a number of ranks.

Each of ``size`` neighbouring ranks keeps one of ``size`` equal parts of the gathered buffer, in the gather dtype, and
backward gathers the whole from them alone. A part lives as long as a window for whose backward it is kept. A rank that
only took part in another's all-gather, or saved nothing for backward, keeps its part until the parameters change: it
may be asked for it, and activation checkpointing reads parameters again.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from fxshard.bucket import ParamBucket


class KeptParts:
    """By bucket: this rank's part of the buffer that was gathered last, and of which version of the flat shard."""

    def __init__(self) -> None:
        self._parts: dict[ParamBucket, tuple[weakref.ref[Tensor], int]] = {}
        self._held: dict[ParamBucket, Tensor] = {}

    @torch.no_grad()
    def keep(self, bucket: ParamBucket, gathered: Tensor) -> Tensor:
        """This rank's part of ``gathered``, for as long as the caller holds it."""
        part = self.current(bucket)
        if part is None:
            assert bucket.kept_part is not None
            part = bucket.kept_part.take(gathered)
            self._parts[bucket] = weakref.ref(part), bucket.flat._version
        return part

    def keep_for_others(self, bucket: ParamBucket, gathered: Tensor) -> None:
        """The same until the flat shard has other values."""
        self._held[bucket] = self.keep(bucket, gathered)

    def drop_stale(self) -> None:
        """Free parts of values that are no more."""
        for bucket in [b for b in self._held if self.current(b) is None]:
            del self._held[bucket]

    def part(self, bucket: ParamBucket) -> Tensor:
        """This rank's part. ``RuntimeError`` if it took no part in the all-gather of forward."""
        part = self.current(bucket)
        if part is None:
            size = bucket.kept_part and bucket.kept_part.size
            raise RuntimeError(
                f"backward of other ranks gathers unit {bucket.unit.name!r} from parts that {size} ranks kept of it, "
                "but this rank has not run its forward, so it has none; run the unit on every rank, or shard it with "
                "reshard_after_forward=True, which gathers from the shards"
            )
        return part

    def current(self, bucket: ParamBucket) -> Tensor | None:
        """This rank's part if it kept one of today's values."""
        ref, version = self._parts.get(bucket, (None, -1))
        return None if ref is None or version != bucket.flat._version else ref()
