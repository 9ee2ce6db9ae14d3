"""What there is to shard: parameters of a unit's modules, units of a model, and everybody's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxshard.bucket import ParamBucket
from fxshard.layout_tensor import LayoutTensor
from fxshard.own_references import references_in
from fxshard.replaced import ReplacedParameter
from fxshard.sharded_class import swap_class
from fxshard.unit import ParamRead, Unit, units_of


@dataclass(eq=False)
class FoundParam:
    """A parameter to shard: its name from the unit's module, and every (module, attribute) that holds it."""

    name: str
    param: nn.Parameter
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)


def check_modules(module: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """The argument of ``fully_shard`` as a tuple without modules that lie inside others of it."""
    if isinstance(module, nn.Module):
        listed: Sequence[nn.Module] = [module]
    else:
        listed = list(module)
        if not listed:
            raise ValueError("fully_shard got an empty list of modules; a unit needs at least one")
        for i, m in enumerate(listed):
            if not isinstance(m, nn.Module):
                raise ValueError(f"fully_shard got a list whose item {i} is a {type(m).__name__}, not a module")
    inside = {id(sub) for m in listed for sub in m.modules() if sub is not m}
    modules = tuple(m for m in dict.fromkeys(listed) if id(m) not in inside)
    for m in modules:
        if isinstance(m, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"fully_shard does not take a {type(m).__name__}: it has no forward that says when its parameters are "
                "used; shard its members"
            )
        for unit in units_of(m, recurse=False):
            raise ValueError(f"module {type(m).__name__} is sharded already (unit {unit.name!r}); fully_shard it once")
    return modules


def collect_params(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[FoundParam]:
    """Parameters of the modules that no unit has, in registration order, shared ones once.

    Where a module holds a parameter that an inner unit took (a tied weight), it is pointed to the sharded one.
    Raises ``ValueError`` for a parameter of 0 dims and ``TypeError`` for a DTensor.
    """
    found: dict[int, FoundParam] = {}
    for name, owner, attr, param in _named_owners(modules):
        if param in ignored or isinstance(param, LayoutTensor):
            continue
        taken = getattr(param, "_fxshard_slot", None)
        if taken is not None:
            point_to(owner, attr, *taken)
            taken[1].slots[taken[2]].owners.append((owner, attr))
            continue
        if isinstance(param, DTensor):
            raise TypeError(
                f"parameter {name!r} is a DTensor with placements {param.placements}; fxshard shards plain parameters, "
                "so shard before other parallelisms distribute it, or list it in ignored_params"
            )
        if param.ndim == 0:
            raise ValueError(
                f"parameter {name!r} has 0 dims and a cut needs one; give it shape (1,) or list it in ignored_params"
            )
        if param.shape[1:].numel() == 0:
            continue  # no row has an element: nothing to gather or reduce
        found.setdefault(id(param), FoundParam(name, param)).owners.append((owner, attr))
    return list(found.values())


def _named_owners(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    seen: set[int] = set()
    for root in modules:
        for prefix, owner in root.named_modules():
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            for attr, param in owner._parameters.items():
                if param is not None:
                    yield f"{prefix}.{attr}" if prefix else attr, owner, attr, param


def point_to(owner: nn.Module, attr: str, unit: Unit, bucket: ParamBucket, index: int) -> None:
    """Let ``owner.attr`` be parameter ``index`` of the bucket, read through ``unit``."""
    owner._parameters[attr] = bucket.slots[index].param
    swap_class(owner, unit, reads={attr: ParamRead(unit, bucket, index)})


def point_references(modules: Sequence[nn.Module], unit: Unit) -> None:
    """Let lists and dicts of parameters that modules keep for themselves read the sharded ones."""

    def find(tensor: torch.Tensor) -> ParamRead | None:
        place = getattr(tensor, "_fxshard_slot", None)
        return ParamRead(*place) if place is not None else None

    for root in modules:
        for module in root.modules():
            if references := references_in(module, find):
                swap_class(module, unit, references=references)


def device_type_of(params: Iterable[nn.Parameter]) -> str:
    """Where the parameters are now; from the CPU or meta they go to CUDA when there is one."""
    for p in params:
        if not isinstance(p, ReplacedParameter) and p.device.type not in ("cpu", "meta"):
            return p.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


def move_unsharded_state(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Move buffers and parameters that stay whole to the device on which the shards compute; meta stays meta."""
    for root in modules:
        for m in root.modules():
            for tensors in (m._parameters, m._buffers):
                for t in tensors.values():
                    if t is not None and not isinstance(t, LayoutTensor) and t.device != device and not t.is_meta:
                        t.data = t.data.to(device)


def find_units(model: nn.Module) -> list[nn.Module | list[nn.Module]]:
    """Units of a model: repeated blocks, and what stands before and after them; see ``shard``."""
    units: list[nn.Module | list[nn.Module]] = []
    containers = _block_containers(model)
    for container in containers:
        units += list(container.children())
    units = list(dict.fromkeys(units))  # a module may stand in several containers
    if containers:
        before, after = ([m for m in around if m not in units] for around in _around(model, containers))
        tied = _param_ids(before) & _param_ids(after)
        if before and not tied:
            units.append(before)
        if after and not tied:
            units.append(after)
    return units


def _block_containers(module: nn.Module) -> list[nn.Module]:
    """Outermost lists or sequences whose members repeat: two or more of one class, every one with parameters."""
    out: list[nn.Module] = []
    for child in module.children():
        blocks = list(child.children())
        repeats = len(blocks) > 1 and len({type(b) for b in blocks}) == 1
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and repeats and all(_param_ids([b]) for b in blocks):
            out.append(child)
        else:
            out += _block_containers(child)
    return out


def _around(model: nn.Module, containers: Sequence[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Modules with parameters registered before the first container and after the last one, outermost ones only."""
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    seen = 0

    def walk(module: nn.Module) -> None:
        nonlocal seen
        for child in module.children():
            if child in containers:
                seen += 1
            elif any(c in list(child.modules()) for c in containers):
                walk(child)
            elif _param_ids([child]) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                if seen == 0:
                    before.append(child)
                elif seen == len(containers):
                    after.append(child)

    walk(model)
    return before, after


def _param_ids(modules: Sequence[nn.Module]) -> set[int]:
    return {id(p) for m in modules for p in m.parameters()}


def name_units(roots: Sequence[nn.Module]) -> None:
    """Name units, buckets and parameters from the outermost module sharded so far. Names are for people and plans."""
    for root in roots:
        names = {id(m): name for name, m in root.named_modules()}
        for unit in units_of(root):
            own = [names[id(m)] or "root" for m in unit.modules if id(m) in names]
            unit.name = "+".join(own)
            for k, bucket in enumerate(unit.buckets):
                bucket.name = unit.name if len(unit.buckets) == 1 else f"{unit.name}#{k}"
                for slot in bucket.slots:
                    owner, attr = slot.owners[0]
                    prefix = names.get(id(owner), "")
                    slot.name = f"{prefix}.{attr}" if prefix else attr
