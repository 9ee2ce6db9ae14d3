"""``fully_shard`` and ``shard``: from an ordinary module to units, buckets and flat shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from fxshard.bucket import BucketDtypes, ParamBucket, make_bucket
from fxshard.bucket_layouts import plan_layouts
from fxshard.cut import Cut
from fxshard.discover import (
    FoundParam,
    check_modules,
    collect_params,
    device_type_of,
    find_units,
    move_unsharded_state,
    name_units,
    point_to,
)
from fxshard.mesh import groups_of, mesh_device, resolve_mesh
from fxshard.placement import RowAtomic
from fxshard.unit import Unit, swap_class, units_of
from fxshard.unshard import Scope

PlacementFn = Callable[[nn.Parameter], Shard | None]


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen dataclass
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
) -> nn.Module | Sequence[nn.Module]:
    """Make ``module`` (or a list of modules, run one after another) one unit: signature and meaning of
    ``torch.distributed.fsdp.fully_shard``.

    Apply it to inner modules first; a unit takes the parameters under its modules that no inner unit has. Each
    parameter becomes a ``LayoutTensor``; the modules keep their identity and their parameters' names. Every rank must
    call it in the same order on models with equal parameters. Collective over the mesh at its first use only (process
    groups are made); no parameter is communicated.

    Args:
        module: what to shard.
        mesh: 1-D (shard) or 2-D (replicate, shard). None: the world, or this process alone.
        reshard_after_forward: gather again for backward. None: True for inner units, False for the outermost.
        shard_placement_fn: the dim to cut a parameter along (``Shard(k)``, any size); None: dim 0.
        mp_policy: dtypes of the full parameters, of the reduction, of forward's inputs and outputs.
        offload_policy: where shards rest; only the default (on the mesh's device) is supported so far.
        ignored_params: left as they are, unsharded and not synchronised.

    Returns the argument. Raises ``ValueError`` for a mesh of more than two dims, an empty list, a member that is no
    module, a module sharded before, a parameter of 0 dims; ``RuntimeError`` in a launch without a process group;
    ``TypeError`` for a parameter that is a DTensor; ``NotImplementedError`` for CPU offload.
    """
    modules = check_modules(module)
    if type(offload_policy) is not OffloadPolicy:
        raise NotImplementedError(
            f"offload_policy {type(offload_policy).__name__} is not supported yet; use OffloadPolicy()"
        )
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise ValueError(f"reshard_after_forward should be a bool or None, got {reshard_after_forward!r}")
    found = collect_params(modules, ignored_params or set())
    mesh = resolve_mesh(mesh, device_type_of(found))
    inner = [u for m in modules for u in units_of(m)]
    unit = Unit(modules, [], bool(reshard_after_forward), mp_policy, Scope(), reshard_after_forward is None)
    unit.buckets = _make_buckets(found, mesh, mp_policy, shard_placement_fn)
    move_unsharded_state(modules, mesh_device(mesh))
    _attach(unit, found)
    for u in inner:
        u.scope = unit.scope
        if u.reshard_by_default:
            u.reshard_after_forward, u.reshard_by_default = True, False
    name_units(modules)
    return module


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    units: str | Sequence[nn.Module | Sequence[nn.Module]] = "auto",
    reshard_after_forward: bool = True,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
) -> nn.Module:
    """Shard a whole model: ``fully_shard`` on each unit, then on the root. Returns ``model``.

    ``units="auto"`` finds them: each block of every repeated ``ModuleList``/``Sequential``, and what stands before and
    after the blocks (embedding; norm and head) as units of their own unless their weights are tied, since a root bucket
    that holds both stays gathered through the whole step. Otherwise ``units`` lists them, each a module or a list of
    modules. ``reshard_after_forward`` holds for every unit, the root included. The rest is as in ``fully_shard``.
    """
    if units == "auto":
        units = find_units(model)
    elif isinstance(units, str):
        raise ValueError(f'units should be "auto" or a list of modules, got {units!r}')
    for unit in [*units, model]:
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=shard_placement_fn,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            ignored_params=ignored_params,
        )
    return model


def _make_buckets(
    found: Sequence[FoundParam], mesh: DeviceMesh, policy: MixedPrecisionPolicy, placement_fn: PlacementFn | None
) -> list[ParamBucket]:
    """Buckets by (storage, gather and reduce dtype, requires_grad), in order of first appearance."""
    groups = groups_of(mesh)
    members: dict[tuple[BucketDtypes, bool], list[FoundParam]] = {}
    for f in found:
        members.setdefault((_dtypes(f.param, policy), f.param.requires_grad), []).append(f)
    buckets = []
    for (dtypes, _), group in members.items():
        placements = [_placement(f, placement_fn) for f in group]
        stored = [f.param.movedim(p.dim, 0).shape for f, p in zip(group, placements, strict=True)]
        for ids, layout in plan_layouts(stored, groups.shard_size, dtypes.gather.itemsize):
            here = [group[i] for i in ids]
            cuts = [
                Cut(mesh, layout, i, placements[k].dim, f.param.shape, placements[k])
                for i, (k, f) in enumerate(zip(ids, here, strict=True))
            ]
            params, owners = [f.param for f in here], [f.owners for f in here]
            bucket = make_bucket(params, owners, cuts, dtypes, groups, mesh_device(mesh))
            for slot, f in zip(bucket.slots, here, strict=True):
                slot.name = f.name
            buckets.append(bucket)
    return buckets


def _dtypes(param: nn.Parameter, policy: MixedPrecisionPolicy) -> BucketDtypes:
    """The policy's dtypes hold for floating-point parameters; others keep their own throughout."""
    storage = param.dtype
    if not storage.is_floating_point:
        return BucketDtypes(storage, storage, storage)
    gather = policy.param_dtype or storage
    return BucketDtypes(storage, gather, policy.reduce_dtype or gather)


def _placement(found: FoundParam, placement_fn: PlacementFn | None) -> Shard:
    asked = placement_fn(found.param) if placement_fn is not None else None
    if asked is None:
        return RowAtomic()
    if type(asked) is not Shard:
        raise NotImplementedError(
            f"shard_placement_fn gave {asked!r} for parameter {found.name!r}; torch's Shard(k) or None are supported"
        )
    ndim = found.param.ndim
    if not -ndim <= asked.dim < ndim:
        raise ValueError(
            f"shard_placement_fn gave Shard({asked.dim}) for parameter {found.name!r}, which has {ndim} dims; "
            f"give a dim in [{-ndim}, {ndim})"
        )
    return RowAtomic() if asked.dim % ndim == 0 else Shard(asked.dim % ndim)


def _attach(unit: Unit, found: Sequence[FoundParam]) -> None:
    """Put the sharded parameters in place of the full ones, and let their modules read through the unit."""
    original = {id(f.owners): f.param for f in found}
    for bucket in unit.buckets:
        bucket.unit = unit
        for i, slot in enumerate(bucket.slots):
            original[id(slot.owners)]._fxshard_slot = (unit, bucket, i)  # type: ignore[attr-defined]
            for owner, attr in slot.owners:
                point_to(owner, attr, unit, bucket, i)
    for module in unit.modules:
        swap_class(module, {}, runs_unit=True)
        module._fxshard_unit = unit  # type: ignore[assignment]
