"""Modules that keep references to parameters beside registering them.

A parameter that a module holds in a list or dict of its own (``self.matrices = [self.a.weight, self.b.weight]``;
``nn.LSTM`` has one) is the tensor from before sharding. Such attributes become properties that read each parameter
through its unit, as ``module.weight`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from fxshard import _torch
from fxshard.unit import ParamRead

_OWN = frozenset(nn.Module().__dict__)  # what nn.Module keeps for itself
Find = Callable[[Tensor], ParamRead | None]


def references_in(module: nn.Module, find: Find) -> dict[str, Any]:
    """Attributes of ``module`` that are lists, tuples or dicts with sharded parameters, as templates.

    A template is the value with a ``ParamRead`` in place of each tensor for which ``find`` gives one.
    """
    templates = {}
    for name, value in module.__dict__.items():
        if name not in _OWN and not name.startswith("_fxshard") and isinstance(value, list | tuple | dict):
            template = _template(value, find)
            if template is not value:
                templates[name] = template
    return templates


def _template(value: Any, find: Find) -> Any:
    """``value`` itself if there is nothing to replace."""
    if isinstance(value, Tensor):
        return find(value) or value
    if type(value) in (list, tuple):
        items = [_template(item, find) for item in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if type(value) is dict:
        entries = {key: _template(item, find) for key, item in value.items()}
        return entries if any(entries[key] is not value[key] for key in value) else value
    return value


def _filled(template: Any, read: Callable[[ParamRead], Tensor]) -> Any:
    if isinstance(template, ParamRead):
        return read(template)
    if type(template) in (list, tuple):
        return type(template)([_filled(item, read) for item in template])
    if type(template) is dict:
        return {key: _filled(item, read) for key, item in template.items()}
    return template


def members_for(base: type, names: Iterable[str], read: Callable[[ParamRead, Tensor], Tensor]) -> dict[str, Any]:
    """Members of the class of a module with references ``names``."""
    members: dict[str, Any] = {name: _property(name, read) for name in names}
    if issubclass(base, nn.RNNBase):
        # Its list of weights is a property now: nothing to rebuild when weights change, no memory to make contiguous.
        members["_weights_have_changed"] = _no_change
        members["_init_flat_weights"] = members["flatten_parameters"] = _nothing_to_do
    return members


def _property(name: str, read: Callable[[ParamRead, Tensor], Tensor]) -> property:
    def get(self: Any) -> Any:
        return _filled(self._fxshard_references[name], lambda source: read(source, source.slot.param))

    def put(self: Any, value: Any) -> None:
        self._fxshard_references[name] = value

    _torch.never_compile_alone(get)
    return property(get, put)


def _no_change(self: Any) -> bool:
    return False


def _nothing_to_do(self: Any) -> None:
    """The list of weights needs no care."""
