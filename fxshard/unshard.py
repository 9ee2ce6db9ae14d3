"""Eager windows: how a sharded model runs where no compiler sees it (uncompiled, graph breaks, skipped frames).

The first read of a parameter while a forward is running gathers its bucket: one all-gather, one autograd node whose
backward is one reduce-scatter. The window closes when the unit's forward ends (``reshard_after_forward``) or when the
outermost forward does. Autograd would keep the gathered buffer alive through the tensors it saves, so while a forward
runs, saved views of a gathered buffer are replaced by their place in it; backward gathers the bucket again, once, and
drops it when the bucket's gradients are reduced. Code that runs inside a backward (recomputation of a checkpointed
region, hooks) reads full parameters too; such windows close when that backward ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxshard import _torch
from fxshard.bucket import ParamBucket


class _Unshard(torch.autograd.Function):
    """flat shard -> every full parameter of the bucket; backward: full gradients -> their reduction."""

    @staticmethod
    def forward(flat: Tensor, window: Window) -> tuple[Tensor, ...]:
        bucket = window.bucket
        gathered = bucket.unit.scope.ahead.gather(bucket)
        window.remember(gathered)
        return tuple(bucket.full_params(gathered))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Window], output: tuple[Tensor, ...]) -> None:
        ctx.window = inputs[1]
        ctx.set_materialize_grads(False)
        slots = ctx.window.bucket.slots
        ctx.mark_non_differentiable(*(p for p, s in zip(output, slots, strict=True) if not s.param.requires_grad))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        ctx.window.regathered = None
        ctx.window.bucket.unit.scope.reduce(ctx.window.bucket, grads)  # which hands gradients out when backward ends
        return None, None


@dataclass(eq=False)
class Window:
    """One bucket's gathered values from gather to last use, and again in backward."""

    bucket: ParamBucket
    storage: int = 0  # address of the gathered buffer's storage
    params: tuple[Tensor, ...] = ()
    differentiable: bool = False
    version: int = 0  # of the flat shard when it was gathered
    gathered_version: int = 0
    in_backward: bool = False  # opened while a backward ran: what is recomputed is needed at once
    saved: bool = False  # autograd saved views of it
    part: Tensor | None = None  # see fxshard.kept_parts
    regathered: Tensor | None = None

    def open(self) -> None:
        """Gather the bucket; collective over its shard group."""
        self.bucket.refresh()
        self.in_backward = _torch.current_backward() != _torch.NO_BACKWARD
        self.differentiable = torch.is_grad_enabled() and self.bucket.requires_grad
        with _torch.outside_transforms():
            self.params = _Unshard.apply(self.bucket.flat, self)
        self.gathered_version = _version(self.params[0])

    def remember(self, gathered: Tensor) -> None:
        self.storage = gathered.untyped_storage().data_ptr()
        self.version = self.bucket.flat._version

    @property
    def serves(self) -> bool:
        """Whether a read now may take what was gathered: values of today, and with a graph if one is being recorded."""
        recorded = self.differentiable or not (torch.is_grad_enabled() and self.bucket.requires_grad)
        return recorded and self.version == self.bucket.flat._version

    def check_unwritten(self) -> None:
        """``RuntimeError`` if forward wrote to full parameters, which are copies of what the ranks own."""
        if self.bucket.groups.gather is not None and _version(self.params[0]) != self.gathered_version:
            raise RuntimeError(
                f"forward wrote in place to a parameter of unit {self.bucket.unit.name!r} (one of "
                f"{[s.name for s in self.bucket.slots][:8]}); a full parameter is a copy for the time of the forward, "
                "so the write would be lost. Keep such state in a buffer, or write to the parameter outside forward"
            )

    def close(self) -> None:
        """Let go of the gathered buffer, of which autograd has places alone; of some ranks' shared one keep a part."""
        if self.bucket.unit.scope.records and self.params and self.bucket.kept_part is not None:
            gathered = self.params[0].detach().as_strided((self.bucket.layout.size,), (1,), 0)
            parts = self.bucket.unit.scope.parts
            if self.saved:
                self.part = parts.keep(self.bucket, gathered)
            else:  # for recomputation, and for ranks whose backward needs it
                parts.keep_for_others(self.bucket, gathered)
        self.params = ()

    @property
    def regathers(self) -> bool:
        """Whether backward gathers again what forward gathered; not what it gathered itself, to recompute."""
        reshards = self.bucket.unit.reshard_after_forward and self.bucket.groups.gather is not None
        return reshards and not self.in_backward

    def regather(self) -> Tensor:
        """The gathered buffer for backward. ``RuntimeError`` if the parameters were changed since forward."""
        if self.bucket.flat._version != self.version:
            raise RuntimeError(
                f"parameters of unit {self.bucket.unit.name!r} were modified in place between forward and backward, so "
                "backward would gather other values than forward used; step the optimizer after backward"
            )
        if self.regathered is None:
            self.bucket.unit.scope.prepare_regather(self)
            self.regathered = self.bucket.unit.scope.ahead.gather(self.bucket)
        return self.regathered


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors count no writes


@dataclass
class SavedParam:
    """What autograd saves in place of a view of a gathered buffer."""

    window: Window
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool  # a complex view that is conjugated lazily

    def restore(self) -> Tensor:
        view = self.window.regather().as_strided(self.size, self.stride, self.offset)
        return view.conj() if self.conjugate else view
