"""Reductions that uncompiled code has on their way, so that each overlaps the backward of the units that follow.

Two slots for the whole tree of units: one for a reduce-scatter, one for an all-reduce. When the gradients of a unit's
bucket are complete,

    A  the all-reduce on its way is waited for,
    B  the reduce-scatter on its way is waited for, and its all-reduce launched,
    C  the bucket's reduce-scatter is launched.

So while layer N - 2 computes, the all-reduce of N and the reduce-scatter of N - 1 are on their way, and no more than
those. At the end of backward A, B and A again. Compiled graphs do the same by their plan.

Ranks follow one order of collectives (``fxshard.agreement``), so what one waits for here, the others have launched or
will without it. But a rank that stops for the others, to ask what comes next, or that only joins a reduction, does B at
once: they may wait for its all-reduce first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fxshard import comm
from fxshard.bucket import ParamBucket


@dataclass
class Flying:
    """A collective from launch to wait. ``buffer`` is its input, ``sent`` what comes back; gradients of ``ids``."""

    bucket: ParamBucket
    buffer: Tensor
    sent: Tensor
    ids: set[int]
    all_reduces: bool  # as it was when backward reduced it


class InFlight:
    """The two slots. Every method that launches or waits is collective over the buckets' meshes."""

    def __init__(self) -> None:
        self._scatter: Flying | None = None
        self._all_reduce: Flying | None = None
        self._done: list[tuple[ParamBucket, Tensor, set[int]]] = []

    def launch(self, bucket: ParamBucket, grads: Sequence[Tensor | None] = ()) -> None:
        """Start to reduce full gradients (by id; None or missing: zeros) and what waits in the bucket."""
        self._finish_all_reduce()
        self.finish_scatter()
        packed, ids = bucket.unreduced.packed(grads)
        sent = comm.start_reduce_scatter(packed, bucket.groups, bucket.reduction)
        self._scatter = Flying(bucket, packed, sent, ids, bucket.unit.all_reduces)

    def finish_scatter(self) -> None:
        """Wait for the reduce-scatter, and launch the all-reduce of what it gives unless a later backward does."""
        flying, self._scatter = self._scatter, None
        if flying is None:
            return
        self._finish_all_reduce()
        b = flying.bucket
        segment = comm.finish_reduce_scatter(flying.sent, flying.buffer, b.groups, b.reduction)
        if not flying.all_reduces:
            b.unreduced.keep("shard", segment, flying.ids)
            return
        ids = flying.ids | b.unreduced.add_to(segment, "shard")
        self._all_reduce = Flying(b, segment, comm.start_all_reduce(segment, b.groups, b.reduction), ids, True)

    def drain(self) -> None:
        """Wait for all."""
        self._finish_all_reduce()
        self.finish_scatter()
        self._finish_all_reduce()

    def take(self) -> list[tuple[ParamBucket, Tensor, set[int]]]:
        """What was reduced since the last call, in order: bucket, grad segment, and whose gradients are in it."""
        done, self._done = self._done, []
        return done

    def drop(self) -> None:
        """Forget all, without waiting."""
        self._scatter = self._all_reduce = None
        self._done.clear()

    def _finish_all_reduce(self) -> None:
        flying, self._all_reduce = self._all_reduce, None
        if flying is not None:
            b = flying.bucket
            segment = comm.finish_all_reduce(flying.sent, flying.buffer, b.groups, b.reduction)
            self._done.append((b, segment.to(b.flat.device, b.grad_dtype), flying.ids))
