"""What every way of sharding must know of a model: its decoder layers, and the parameters of another dtype."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fxshard.distributed.queries import is_master


@dataclass(frozen=True)
class LayerFinder:
    """One way to find decoder layers. places: where `find` looks, for the message when nothing is found."""

    places: tuple[str, ...]
    matches: Callable[[nn.Module], bool]
    find: Callable[[nn.Module], list[nn.Module]]


_DECODER_PATHS = ("model.layers", "model.language_model.layers")


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The first non-empty list of modules of one class among `_DECODER_PATHS`, or nothing."""
    for path in _DECODER_PATHS:
        found: object = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if isinstance(found, (nn.ModuleList, nn.Sequential)) and len({type(layer) for layer in found}) == 1:
            return list(found)
    return []


# Tried in this order; insert before the built-in one to prefer another.
LAYER_FINDERS: list[LayerFinder] = [
    LayerFinder(
        places=tuple(f"model.{path}" for path in _DECODER_PATHS),
        matches=lambda model: bool(_decoder_layers(model)),
        find=_decoder_layers,
    )
]


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of `model`, the same objects, in order, by the first of `LAYER_FINDERS` that matches.

    RuntimeError naming the model's class and the places looked at if none does.
    """
    for finder in LAYER_FINDERS:
        if finder.matches(model):
            return finder.find(model)
    places = ", ".join(place for finder in LAYER_FINDERS for place in finder.places)
    raise RuntimeError(
        f"no decoder layers found in {type(model).__name__}: looked for a non-empty list of modules of one class at "
        f"{places}; shard its modules yourself, or add a LayerFinder to fxshard.distributed.layers.LAYER_FINDERS"
    )


@dataclass(frozen=True)
class OffDtype:
    """Parameters of a dtype other than the model's dominant one, which cannot share a shard group with the rest.

    dominant: the dtype with most elements over the whole model (the earlier registered at a tie), None without
    parameters. parameters: the others by name, each tensor once. share: their part of the model's elements, 0 to 1.
    """

    dominant: torch.dtype | None
    parameters: dict[str, nn.Parameter]
    share: float

    def within(self, modules: Iterable[nn.Module]) -> OffDtype:
        """Only those that belong to one of `modules`."""
        inside = {id(parameter) for module in modules for parameter in module.parameters()}
        kept = {name: parameter for name, parameter in self.parameters.items() if id(parameter) in inside}
        numel = sum(parameter.numel() for parameter in self.parameters.values())
        part = sum(parameter.numel() for parameter in kept.values()) / numel if numel else 0.0
        return OffDtype(self.dominant, kept, self.share * part)


def off_dtype(model: nn.Module) -> OffDtype:
    """The parameters of `model` whose dtype is not the dominant one. The same on every rank."""
    elements: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
    dominant = max(elements, key=lambda dtype: elements[dtype], default=None)
    off = {name: parameter for name, parameter in model.named_parameters() if parameter.dtype != dominant}
    total = sum(elements.values())
    return OffDtype(dominant, off, sum(parameter.numel() for parameter in off.values()) / total if total else 0.0)


def warn_off_dtype(off: OffDtype, consequence: str) -> None:
    """Warn on rank 0 with the names and the share of `off`, and with `consequence`; nothing if there are none."""
    if not off.parameters or not is_master():
        return
    names = list(off.parameters)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    dtypes = ", ".join(sorted({str(parameter.dtype) for parameter in off.parameters.values()}))
    warnings.warn(
        f"{len(names)} parameters ({100 * off.share:.3g} % of the model's elements) are {dtypes}, not {off.dominant}: "
        f"{shown}; {consequence}",
        stacklevel=3,
    )
