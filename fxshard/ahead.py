"""All-gathers that eager code launches ahead, for units that other units name as their next ones."""

from __future__ import annotations

import torch
from torch import Tensor

from fxshard import comm
from fxshard.bucket import ParamBucket


class Ahead:
    """What is on its way: by bucket, what was launched, from which segment, and of which version of the flat shard."""

    def __init__(self) -> None:
        self._launched: dict[ParamBucket, tuple[Tensor, Tensor, int]] = {}

    def __contains__(self, bucket: ParamBucket) -> bool:
        return bucket in self._launched

    @torch.no_grad()
    def launch(self, bucket: ParamBucket) -> None:
        """Start the bucket's all-gather; collective over its shard group, of more than one rank."""
        bucket.refresh()
        segment = bucket.gather_input()
        self._launched[bucket] = (comm.start_all_gather(segment, bucket.groups), segment, bucket.flat._version)

    @torch.no_grad()
    def gather(self, bucket: ParamBucket) -> Tensor:
        """The gathered buffer: what was launched, if the flat shard is unchanged since then, or a new all-gather."""
        if (launched := self._launched.pop(bucket, None)) is not None:
            started, segment, version = launched
            gathered = comm.finish_all_gather(started, segment)
            if version == bucket.flat._version:
                return gathered
        return comm.all_gather(bucket.gather_input(), bucket.groups)

    def drop(self) -> None:
        """Wait for what nobody took."""
        for started, segment, _ in self._launched.values():
            comm.finish_all_gather(started, segment)
        self._launched.clear()
