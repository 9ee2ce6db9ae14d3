"""Unit: modules whose parameters are gathered together, and how such modules read their parameters.

The class of every module that owns sharded parameters is swapped for a subclass whose properties return the full
parameter while a forward of the tree runs, and the LayoutTensor otherwise; the class of a unit's own modules also gets
a ``forward`` that says when that is. Under Dynamo a read is the op ``gather_param``; eagerly it is a window's view.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

from fxshard.bucket import ParamBucket
from fxshard.unshard import Scope


@dataclass(eq=False)
class Unit:
    """``modules`` run as one gather window; ``buckets`` hold the parameters that no inner unit holds."""

    modules: tuple[nn.Module, ...]
    buckets: list[ParamBucket]
    reshard_after_forward: bool
    policy: MixedPrecisionPolicy
    scope: Scope
    reshard_by_default: bool = False  # the user left it open: True for inner units, False for the outermost
    name: str = ""
    _ran: set[int] = field(default_factory=set)

    def ran(self, module: nn.Module) -> bool:
        """Note that one of the modules finished its forward; True when all have, and the window may close."""
        self._ran.add(id(module))
        if len(self._ran) < len(self.modules):
            return False
        self._ran.clear()
        return True


@dataclass(frozen=True, eq=False)
class ParamRead:
    """What one property of a sharded module reads."""

    unit: Unit
    bucket: ParamBucket
    index: int


_swapped: weakref.WeakValueDictionary[tuple[type, frozenset[str], bool], type] = weakref.WeakValueDictionary()


class ShardedModule:
    """Mixed into the class of every module that fxshard changed: units' own modules and owners of parameters."""

    _fxshard_unit: Unit | None = None
    _fxshard_reads: dict[str, ParamRead]

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed after forward and gathered again for backward, from the next call on."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward).__name__}")
        for unit in units_of(self, recurse):
            unit.reshard_after_forward = reshard_after_forward
            unit.reshard_by_default = False


def units_of(module: Any, recurse: bool = True) -> list[Unit]:
    """The units of a module and, with ``recurse``, of the modules inside it, outermost first, each once."""
    modules = module.modules() if recurse else [module]
    return list(dict.fromkeys(u for m in modules if (u := getattr(m, "_fxshard_unit", None)) is not None))


def swap_class(module: nn.Module, reads: dict[str, ParamRead], *, runs_unit: bool) -> None:
    """Give ``module`` the properties of ``reads`` (added to those it has) and, for a unit's own, the forward."""
    known: dict[str, ParamRead] = module.__dict__.get("_fxshard_reads", {})
    reads = {**known, **reads}
    cls = type(module)
    base = cls.__mro__[2] if issubclass(cls, ShardedModule) else cls  # swapped class, ShardedModule, original
    runs_unit = runs_unit or ("forward" in cls.__dict__ and issubclass(cls, ShardedModule))
    key = (base, frozenset(reads), runs_unit)
    swapped = _swapped.get(key)
    if swapped is None:
        members: dict[str, Any] = {name: _reader(name) for name in reads}
        if runs_unit:
            members["forward"] = _forward
        members["_fxshard_base"] = base
        members["__module__"] = base.__module__
        members["__qualname__"] = base.__qualname__
        swapped = type(base.__name__, (ShardedModule, base), members)
        _swapped[key] = swapped
    module._fxshard_reads = reads  # type: ignore[assignment]
    module.__class__ = swapped


def _reader(name: str) -> property:
    def read(self: Any) -> Tensor:
        source = self._fxshard_reads[name]
        if source.unit.scope.depth == 0:
            return self._parameters[name]
        if torch.compiler.is_compiling():
            return torch.ops.fxshard.gather_param(source.bucket.flat, source.bucket.key, source.index)
        return source.unit.scope.read(source.bucket, source.index)

    return property(read)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    unit = self._fxshard_unit
    policy = unit.policy
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args, kwargs = _cast_floating((args, kwargs), policy.param_dtype)
    if torch.compiler.is_compiling():
        unit.scope.depth += 1
        try:
            out = self._fxshard_base.forward(self, *args, **kwargs)
        finally:
            unit.scope.depth -= 1
    else:
        with unit.scope.entered(unit, self):
            out = self._fxshard_base.forward(self, *args, **kwargs)
    return out if policy.output_dtype is None else _cast_floating(out, policy.output_dtype)


def _cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    cast: Callable[[Tensor], Tensor] = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
    return tree_map_only(Tensor, cast, tree)
