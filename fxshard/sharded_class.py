"""The class that a module gets when it is sharded.

Its class is swapped for a subclass of it whose properties return the full parameter while a forward of the tree runs,
and the LayoutTensor otherwise, and whose ``forward`` says when that is. Under Dynamo a read is the op ``gather_param``;
eagerly it is a window's view.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fxshard import _torch, ops  # noqa: F401  defines gather_param
from fxshard.bucket import ParamBucket
from fxshard.own_references import members_for
from fxshard.scope import Scope
from fxshard.sharded_module import ShardedModule
from fxshard.unit import ParamRead, Unit

_classes: weakref.WeakValueDictionary[tuple[type, frozenset[str], frozenset[str]], type] = weakref.WeakValueDictionary()


def swap_class(
    module: nn.Module,
    unit: Unit,
    *,
    reads: Mapping[str, ParamRead] | None = None,
    references: Mapping[str, Any] | None = None,
    runs_unit: bool = False,
) -> None:
    """Let ``module`` read its parameters ``reads`` through their units, in addition to those it reads so already.

    Args:
        unit: one with whose scope the module's forward runs.
        references: attributes with lists and dicts of parameters, see ``fxshard.own_references``.
        runs_unit: the module is one of the unit's own.
    """
    cls = type(module)
    base = cls.__mro__[2] if issubclass(cls, ShardedModule) else cls  # swapped class, ShardedModule, original
    state = module.__dict__
    state["_fxshard_through"] = unit
    state["_fxshard_reads"] = {**state.get("_fxshard_reads", {}), **(reads or {})}
    state["_fxshard_references"] = {**state.get("_fxshard_references", {}), **(references or {})}
    state.setdefault("_fxshard_forward", state.pop("forward", None))
    for name in references or {}:
        state.pop(name, None)
    module.__class__ = _class_for(module, base, runs_unit or getattr(cls, "_fxshard_runs_unit", False))


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a sharded module run as ``forward`` does: in it, parameters read full.

    For ``encode``, ``generate`` and the like that users call on the module itself. As
    ``torch.distributed.fsdp.register_fsdp_forward_method``, it does nothing to a module that is not sharded. Raises
    ``ValueError`` if the module has no such method.
    """
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r} to register as a forward method")
    if not isinstance(module, ShardedModule):
        return
    bound = getattr(method, "__self__", None) is module
    function = method.__func__ if bound else lambda _, *args, **kwargs: method(*args, **kwargs)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(self, function, (self, *args), kwargs)

    own = types.FunctionType(run.__code__.replace(), run.__globals__, method_name, None, run.__closure__)
    module.__dict__[method_name] = types.MethodType(functools.update_wrapper(own, function), module)


def _class_for(module: Any, base: type, runs_unit: bool) -> type:
    """One class for all modules that read the same names; a unit's own module gets a class, and so code, of its own.

    Dynamo keeps compiled variants by code object and gives up when there are too many; each unit needs a variant, since
    the graph of each names its own buckets.
    """
    reads, references = frozenset(module._fxshard_reads), frozenset(module._fxshard_references)
    key = (base, reads, references)
    found = None if runs_unit else _classes.get(key)
    if found is not None:
        return found
    members: dict[str, Any] = {name: _reader(name) for name in reads}
    members |= members_for(base, references, read)
    original, replaced = _run_original.__code__, _run_replaced.__code__
    if runs_unit:
        original, replaced = original.replace(), replaced.replace()
    for name, code in (("_fxshard_run_original", original), ("_fxshard_run_replaced", replaced)):
        members[name] = types.FunctionType(code, globals(), "forward")
        members[name].__wrapped__ = base.forward  # type: ignore[attr-defined]  # whose signature users see
    members["forward"] = _Forward(members["_fxshard_run_original"])
    members["_fxshard_base"], members["_fxshard_runs_unit"] = base, runs_unit
    members["__module__"], members["__qualname__"] = base.__module__, base.__qualname__
    made = type(base.__name__, (ShardedModule, base), members)
    if not runs_unit:
        _classes[key] = made
    return made


# -- reading -----------------------------------------------------------------------------------------------------------


def _reader(name: str) -> property:
    def get(self: Any) -> Any:
        return read(self._fxshard_reads[name], self._parameters[name])

    _torch.never_compile_alone(get)
    return property(get)


def read(source: ParamRead, held: Tensor) -> Tensor:
    """The parameter that ``source`` names: full inside a forward, else ``held``, the sharded one."""
    unit, bucket = source.unit, source.bucket
    if torch.compiler.is_compiling():
        return _traced_read(unit, bucket, source.index) if unit.scope.depth > 0 else held
    return unit.scope.read(bucket, source.index) if unit.scope.reads_full(bucket) else held


def _traced_read(unit: Unit, bucket: ParamBucket, index: int) -> Tensor:
    gather, flat = torch.ops.fxshard.gather_param, bucket.flat
    if bucket.slots[index].detached:
        return gather(flat.detach(), bucket.key, index)
    stage, scale = unit.stage, unit.scale
    if stage != "all" and flat.requires_grad:
        return gather(flat.detach(), bucket.key, index, stage, bucket.unreduced.sinks[stage], scale)
    return gather(flat, bucket.key, index) if scale is None else gather(flat, bucket.key, index, stage, None, scale)


# -- running -----------------------------------------------------------------------------------------------------------


class _Forward:
    """``module.forward``: the class's, or one that a user put on the instance in its place."""

    def __init__(self, described: Any) -> None:
        self._described = described

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self._described  # for inspect.signature and the like
        if module._fxshard_forward is None:
            return module._fxshard_run_original
        return module._fxshard_run_replaced

    def __set__(self, module: Any, forward: Callable[..., Any]) -> None:
        module.__dict__["_fxshard_forward"] = forward

    def __delete__(self, module: Any) -> None:
        module.__dict__["_fxshard_forward"] = None


def _run_original(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(self, self._fxshard_base.forward, (self, *args), kwargs)


def _run_replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(self, self._fxshard_forward, args, kwargs)


def _run(self: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward in which parameters read full, with the casts of the unit's policy if the module is a unit's own."""
    unit = self._fxshard_unit
    if unit is None:
        scope = self._fxshard_through.scope
        return function(*args, **kwargs) if scope.depth > 0 else _inside(self, scope, function, args, kwargs)
    policy = unit.policy
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args, kwargs = _cast_floating((args, kwargs), policy.param_dtype)
    out = _inside(self, unit.scope, function, args, kwargs)
    return out if policy.output_dtype is None else _cast_floating(out, policy.output_dtype)


def _inside(
    module: nn.Module, scope: Scope, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if torch.compiler.is_compiling():
        scope.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            scope.depth -= 1
    with scope.entered(module):
        return function(*args, **kwargs)


def _cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    cast: Callable[[Tensor], Tensor] = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
    return tree_map_only(Tensor, cast, tree)


# Where a graph breaks, these run as they are, and Dynamo compiles what they call.
for _function in (_Forward.__get__, _run_original, _run_replaced, _run, _inside, _cast_floating, read):
    _torch.never_compile_alone(_function)
