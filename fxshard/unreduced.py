"""Gradients that wait for their reduction: accumulation without communication, and a delayed all-reduce.

While a unit does not synchronise gradients, gradients of full parameters are kept on each rank, in the reduce dtype;
the next reduction adds them to what it reduces. Eager backwards hand them over; in a compiled graph a parameter's
gradient flows to a *sink* instead, a leaf of the parameter's shape without memory whose ``.grad`` autograd accumulates.
On a (replicate, shard) mesh the second stage alone can wait: then the reduce-scattered segment is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxshard import comm

if TYPE_CHECKING:
    from fxshard.bucket import ParamBucket


class Unreduced:
    """What one bucket keeps. Every method that reduces is collective over the bucket's mesh."""

    def __init__(self, bucket: ParamBucket) -> None:
        self._bucket = bucket
        self._kept: dict[int, Tensor] = {}
        self._segment: Tensor | None = None  # reduce-scattered, not yet all-reduced
        self._segment_ids: set[int] = set()

    @property
    def left_over(self) -> bool:
        """Whether something waits."""
        return bool(self._kept or self._diverted()) or self._segment is not None

    def keep(self, grads: Sequence[Tensor | None]) -> None:
        """Add full gradients, by parameter id, to what waits."""
        for i, grad in enumerate(grads):
            if grad is not None:
                self._add(self._kept, i, grad)

    def make_sinks(self) -> None:
        """Give every parameter of the bucket a sink, for graphs that are compiled from now on."""
        b = self._bucket
        for slot in b.slots:
            if slot.sink is None:
                zero = torch.zeros((), dtype=b.dtypes.reduce, device=b.flat.device)
                slot.sink = zero.expand(slot.cut.shape).requires_grad_()

    def reduce(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """The grad segment, storage dtype, of full gradients (by id; may be empty) and all that waits.

        Tells the bucket whose gradients are in it. None where the all-reduce is delayed.
        """
        b = self._bucket
        full = {i: _dense(g) for i, g in enumerate(grads) if g is not None}
        for waiting in (self._kept, self._taken_from_sinks()):
            for i, grad in waiting.items():
                self._add(full, i, grad)
        self._kept = {}
        segment = self._reduced(b.pack([full.get(i) for i in range(len(b.slots))]), set(full))
        return None if segment is None else segment.to(b.dtypes.storage)

    def _reduced(self, packed: Tensor, ids: set[int]) -> Tensor | None:
        b, groups = self._bucket, self._bucket.groups
        if groups.replicate is None or (b.unit.all_reduces and self._segment is None):
            b.note_reduced(ids)
            return comm.reduce_mean(packed, groups, b.divisor)
        segment = comm.reduce_mean(packed, replace(groups, replicate=None), 1.0)
        self._segment = segment if self._segment is None else self._segment + segment
        self._segment_ids |= ids
        if not b.unit.all_reduces:
            return None
        segment, self._segment = self._segment, None
        ids, self._segment_ids = self._segment_ids, set()
        b.note_reduced(ids)
        return comm.reduce_mean(segment, replace(groups, reduce=None), b.divisor)

    def _diverted(self) -> dict[int, Tensor]:
        sinks = {i: s.sink for i, s in enumerate(self._bucket.slots) if s.sink is not None}
        return {i: sink.grad for i, sink in sinks.items() if sink.grad is not None}

    def _taken_from_sinks(self) -> dict[int, Tensor]:
        taken = self._diverted()
        for i in taken:
            self._bucket.slots[i].sink.grad = None  # type: ignore[union-attr]
        return taken

    def _add(self, to: dict[int, Tensor], i: int, grad: Tensor) -> None:
        before = to.get(i)
        dtype = self._bucket.dtypes.reduce
        # Not in place: what autograd hands over may be shared with others.
        to[i] = _dense(grad).to(dtype) if before is None else before.to(dtype) + _dense(grad).to(dtype)


def _dense(grad: Tensor) -> Tensor:
    """Sparse gradients (``nn.Embedding(sparse=True)``) are reduced as dense ones."""
    return grad if grad.layout is torch.strided else grad.to_dense()
