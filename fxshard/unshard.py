"""Eager windows: how a sharded model runs where no compiler sees it (uncompiled, graph breaks, skipped frames).

The first read of a parameter while a forward is running gathers its bucket: one all-gather, one autograd node whose
backward is one reduce-scatter. The window closes when the unit's forward ends (``reshard_after_forward``) or when the
outermost forward does. Autograd would keep the gathered buffer alive through the tensors it saves, so while a forward
runs, saved views of a gathered buffer are replaced by their place in it; backward gathers the bucket again, once, and
drops it when the bucket's gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxshard import _torch, comm
from fxshard.bucket import ParamBucket

if TYPE_CHECKING:
    from fxshard.unit import Unit


class _Unshard(torch.autograd.Function):
    """flat shard -> every full parameter of the bucket; backward: full gradients -> gradient of the flat shard."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, window: Window) -> tuple[Tensor, ...]:
        ctx.window = window
        ctx.set_materialize_grads(False)
        gathered = comm.all_gather(flat.detach().to(window.bucket.dtypes.gather), window.bucket.groups)
        window.remember(gathered)
        return tuple(window.bucket.full_params(gathered))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        bucket = ctx.window.bucket
        ctx.window.regathered = None
        bucket.note_reduced(i for i, g in enumerate(grads) if g is not None)
        packed = bucket.pack(grads)
        del grads
        return comm.reduce_mean(packed, bucket.groups, bucket.divisor).to(bucket.dtypes.storage), None


@dataclass(eq=False)
class Window:
    """One bucket's gathered values from gather to last use, and again in backward."""

    bucket: ParamBucket
    storage: int = 0  # address of the gathered buffer's storage
    params: tuple[Tensor, ...] = ()
    version: int = 0
    regathered: Tensor | None = None

    def open(self) -> None:
        self.bucket.refresh()
        self.params = _Unshard.apply(self.bucket.flat, self)

    def remember(self, gathered: Tensor) -> None:
        self.storage = gathered.untyped_storage().data_ptr()
        self.version = self.bucket.flat._version

    @property
    def regathers(self) -> bool:
        """Whether backward gathers again what forward gathered."""
        return self.bucket.unit.reshard_after_forward and self.bucket.groups.gather is not None

    def regather(self) -> Tensor:
        """The gathered buffer for backward. ``RuntimeError`` if the parameters were changed since forward."""
        if self.bucket.flat._version != self.version:
            raise RuntimeError(
                f"parameters of unit {self.bucket.unit.name!r} were modified in place between forward and backward, so "
                "backward would gather other values than forward used; step the optimizer after backward"
            )
        if self.regathered is None:
            with torch.no_grad():
                flat = self.bucket.flat.detach().to(self.bucket.dtypes.gather)
                self.regathered = comm.all_gather(flat, self.bucket.groups)
            if not self.bucket.requires_grad:  # no reduction will close this window
                torch.autograd.Variable._execution_engine.queue_callback(self._drop)
        return self.regathered

    def _drop(self) -> None:
        self.regathered = None


@dataclass
class _SavedParam:
    window: Window
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class Scope:
    """The forwards of one tree of units: how deep they are nested now, and the windows that are open.

    ``depth`` is what decides what reading a parameter means: sharded at 0, full above. Compiled code guards on it.
    """

    depth: int = 0
    windows: dict[ParamBucket, Window] = field(default_factory=dict)

    def read(self, bucket: ParamBucket, index: int) -> Tensor:
        window = self.windows.get(bucket)
        if window is None or (torch.is_grad_enabled() and bucket.requires_grad and not window.params[0].requires_grad):
            window = Window(bucket)
            window.open()
            self.windows[bucket] = window
        return window.params[index]

    def close(self, buckets: list[ParamBucket]) -> None:
        for bucket in buckets:
            self.windows.pop(bucket, None)

    @contextmanager
    def entered(self, unit: Unit, module: nn.Module) -> Iterator[None]:
        """One forward of ``module``, a module of ``unit``, run eagerly."""
        self.depth += 1
        outermost = self.depth == 1
        try:
            # Hooks do not compose: inside somebody else's (activation checkpointing, offload) theirs must see all.
            if outermost and not _torch.saved_tensor_hooks_active():
                with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                    yield
            else:
                yield
        finally:
            self.depth -= 1
            if outermost:
                self.windows.clear()
            elif unit.reshard_after_forward and unit.ran(module):
                self.close(unit.buckets)

    def _pack(self, saved: Tensor) -> Tensor | _SavedParam:
        if not self.windows or saved.layout is not torch.strided or type(saved) not in (Tensor, nn.Parameter):
            return saved
        window = self._window_at(saved.untyped_storage().data_ptr())
        if window is None or not window.regathers or saved.dtype != window.bucket.dtypes.gather:
            return saved
        return _SavedParam(window, saved.size(), saved.stride(), saved.storage_offset())

    def _window_at(self, address: int) -> Window | None:
        return next((w for w in self.windows.values() if w.storage == address), None)


def _unpack(saved: Tensor | _SavedParam) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.window.regather().as_strided(saved.size, saved.stride, saved.offset)


