"""Gradients that wait for their reduction: accumulation without communication, and a delayed all-reduce.

A bucket keeps at most two buffers between backwards, both in the reduce dtype: the *packed* gradients of backwards that
did not reduce (stage "none", as long as the layout, one per rank), and the *segment* of backwards that reduced over the
shard dim alone (stage "shard", 1/W as long). Each is one buffer that every further backward adds to in one kernel, at
the layout's offsets, so gradients of different sets of parameters never mix. The next reduction that goes further adds
what waits to what it reduces.

Eager backwards hand gradients over. In a compiled graph they flow to a *sink*, a leaf of the buffer's length without
memory, and what autograd accumulates there is taken over; ``fxshard::add_waiting`` is where a graph takes what waits.
Main gradients have a sink as well, since autograd would cast them to the dtype of the flat shard.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxshard.noted import Noted
from fxshard.reduction import Stage, as_stage

if TYPE_CHECKING:
    from fxshard.bucket import ParamBucket


@dataclass
class Waiting:
    """A buffer of gradients of parameters ``ids``; ``version`` is the flat shard's when the first came."""

    buffer: Tensor
    ids: set[int]
    version: int


class Unreduced:
    """What one bucket keeps. Nothing here is collective."""

    def __init__(self, bucket: ParamBucket) -> None:
        self._bucket = bucket
        self._waiting: dict[Stage, Waiting] = {}
        self._noted: dict[Stage, Noted] = {"none": Noted(), "shard": Noted(), "main": Noted()}
        self.sinks: dict[str, Tensor] = {}

    @property
    def may_wait(self) -> bool:
        """Whether gradients ever waited, so that graphs look for them."""
        return "none" in self.sinks

    @property
    def ids(self) -> set[int]:
        """Parameters whose gradients wait."""
        return {i for waiting in self._waiting.values() for i in waiting.ids}

    @property
    def due(self) -> bool:
        """Whether something waits that the unit's present settings let a backward reduce."""
        unit = self._bucket.unit
        return unit.reduces and ("none" in self._waiting or ("shard" in self._waiting and unit.all_reduces))

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Unreduced:
        twin = Unreduced(copy.deepcopy(self._bucket, memo))
        twin._waiting = copy.deepcopy(self._waiting, memo)
        twin.make_sinks(self.sinks)
        return twin

    def make_sinks(self, stages: Iterable[str]) -> None:
        """Give graphs that are compiled from now on leaves for gradients that flow elsewhere than to ``.grad``."""
        b = self._bucket
        for stage in map(as_stage, stages):
            if stage not in self.sinks:
                length = b.layout.size if stage == "none" else b.segment_size
                device = b.flat.device if stage == "main" else b.device
                zero = torch.zeros((), dtype=b.dtypes.reduce, device=device)
                sink = zero.expand(length).requires_grad_()
                sink.register_post_accumulate_grad_hook(lambda sink, stage=stage: self._take_over(sink, stage))  # type: ignore[misc]
                self.sinks[stage] = sink

    def note(self, stage: Stage, ids: Iterable[int]) -> None:
        """Say whose gradients the running backward sends to the sink of a stage."""
        self._noted[stage].add(ids)

    def _take_over(self, sink: Tensor, stage: Stage) -> None:
        buffer, sink.grad = sink.grad, None
        assert buffer is not None
        if stage == "main":
            self._bucket.unit.scope.note_segment(self._bucket, buffer, self._noted[stage].take())
            return
        self.keep(stage, buffer, self._noted[stage].take())

    def keep(self, stage: Stage, buffer: Tensor, ids: Iterable[int]) -> None:
        """Add gradients reduced as far as ``stage`` to what waits there."""
        waiting = self._waiting.get(stage)
        if waiting is None:
            self._waiting[stage] = Waiting(buffer, set(ids), self._bucket.flat._version)
            return
        self._check_version(waiting)
        waiting.buffer.add_(buffer)
        waiting.ids.update(ids)

    def add_to(self, buffer: Tensor, kept: Stage) -> set[int]:
        """Add what waits at a stage to ``buffer``, in place, and forget it. Returns whose gradients those are."""
        waiting = self._waiting.pop(kept, None)
        if waiting is None:
            return set()
        self._check_version(waiting)
        buffer.add_(waiting.buffer)
        return waiting.ids

    def packed(self, grads: Sequence[Tensor | None]) -> tuple[Tensor, set[int]]:
        """What a reduction sends: full gradients (by id; may be empty) and those that wait, packed and scaled. And
        whose they are."""
        b = self._bucket
        ids = {i for i, g in enumerate(grads) if g is not None}
        packed = b.pack([None if g is None else dense(g) for g in grads] or [None] * len(b.slots))
        ids |= self.add_to(packed, "none")
        if b.unit.scale is not None:
            packed.mul_(b.unit.scale)
        return packed, ids

    def _check_version(self, waiting: Waiting) -> None:
        if waiting.version == self._bucket.flat._version:
            return
        waiting.version = self._bucket.flat._version
        names = ", ".join(self._bucket.slots[i].name for i in sorted(waiting.ids)[:4])
        warnings.warn(
            f"parameters of unit {self._bucket.unit.name!r} changed (an optimizer step?) while gradients of {names} "
            "waited for their reduction, so that step went without them; run the last micro-batch before a step with "
            "set_requires_gradient_sync(True) and set_requires_all_reduce(True)",
            stacklevel=2,
        )


def dense(grad: Tensor) -> Tensor:
    """Sparse gradients (``nn.Embedding(sparse=True)``) are reduced as dense ones."""
    return grad if grad.layout is torch.strided else grad.to_dense()
