"""``fully_shard`` and ``shard``: from an ordinary module to units, buckets and flat shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fxshard.bucketing import Placed, PlacementFn, Sharding, make_buckets, place
from fxshard.discover import (
    FoundParam,
    check_modules,
    collect_params,
    device_type_of,
    find_units,
    move_unsharded_state,
    name_units,
    point_references,
    point_to,
)
from fxshard.mesh import mesh_device, resolve_mesh
from fxshard.replaced import ReplacedParameter
from fxshard.same_start import start_alike
from fxshard.scope import Scope
from fxshard.sharded_class import swap_class
from fxshard.unit import Unit, units_of


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen dataclass
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    replicate_params: set[nn.Parameter] | None = None,
    param_mp_policies: Mapping[nn.Parameter, MixedPrecisionPolicy] | None = None,
    main_grads: bool = False,
) -> nn.Module | Sequence[nn.Module]:
    """Make ``module`` (or a list of modules, run one after another) one unit: signature and meaning of
    ``torch.distributed.fsdp.fully_shard``.

    Apply it to inner modules first; a unit takes the parameters under its modules that no inner unit has. Each
    parameter becomes a ``LayoutTensor``; the modules keep their identity and their parameters' names. The full
    parameters it had before can no longer be used: build the optimizer afterwards. Every rank must call it in the same
    order on models of equal structure. Collective over the mesh: ranks compare checksums of the parameters, and where
    they differ all take those of the mesh's first rank.

    Args:
        module: what to shard.
        mesh: 1-D (shard) or 2-D (replicate, shard). None: the world, or this process alone.
        reshard_after_forward: gather again for backward. None: True for inner units, False for the outermost. An int
            that divides the shard size: between forward and backward, so many neighbouring ranks share the full
            parameters (each keeps so large a part, in the gather dtype), and backward gathers from them alone, e.g.
            within a host. 1 is False, the shard size is True.
        shard_placement_fn: how to cut a parameter: ``Shard(k)`` along dim k, of any size; ``BlockAtomic(rows)`` along
            dim 0 between blocks of rows; ``TensorAtomic()`` not at all, one rank owns it; None: along dim 0. A pair of
            one of these and a mesh cuts it over that mesh, e.g. experts over an expert group.
        mp_policy: dtypes of the full parameters, of the reduction, of forward's inputs and outputs.
        offload_policy: where shards and gradients rest; ``CPUOffloadPolicy()``: on the CPU, from where gathers copy
            their input and to where reductions copy their output. On a CPU mesh that is where they are anyway.
        ignored_params: left as they are, unsharded and not synchronised.
        replicate_params: whole on every rank, with gradients all-reduced over all ranks of the mesh.
        param_mp_policies: ``param_dtype`` and ``reduce_dtype`` of single parameters, in place of ``mp_policy``'s.
        main_grads: reduced gradients are not cast to the parameter's dtype but stay in the reduce dtype, as
            ``param.main_grad``, and ``param.grad`` stays None; for optimizers that read them there, and reset them to
            None.

    Returns the argument. Raises ``ValueError`` for a mesh of more than two dims, an empty list, a member that is no
    module, a module sharded before, a parameter of 0 dims, a number of ranks that does not divide a shard size;
    ``RuntimeError`` in a launch without a process group; ``TypeError`` for a parameter that is a DTensor, and for a
    policy or a parameter that is none.
    """
    modules = check_modules(module)
    _check_options(offload_policy, replicate_params or (), param_mp_policies or {})
    found = collect_params(modules, ignored_params or set())
    mesh = resolve_mesh(mesh, device_type_of(f.param for f in found))
    inner = [u for m in modules for u in units_of(m)]
    sharding = Sharding(
        mesh, mp_policy, shard_placement_fn, replicate_params or frozenset(), param_mp_policies or {}
    )
    placed = place(found, sharding)
    reshards, size = _reshards(reshard_after_forward, mesh, placed)
    unit = Unit(modules, [], bool(reshards), mp_policy, Scope(), size, reshards is None, main_grads=main_grads)
    for shared in dict.fromkeys(p.mesh for p in placed):
        here = [p.found for p in placed if p.mesh is shared]
        start_alike([f.param for f in here], [f.name for f in here], shared)
    unit.buckets = make_buckets(placed, offload_policy)
    move_unsharded_state(modules, mesh_device(mesh))
    _attach(unit, found)
    for bucket in unit.buckets:
        bucket.follow_main_grads()
        _ = bucket.kept_part  # makes its group here, where every rank comes
    unit.scope.units = [unit, *inner]
    for u in inner:
        u.scope = unit.scope
        if u.reshard_by_default:
            u.set_reshard(True)
    name_units(modules)
    return module


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    units: str | Sequence[nn.Module | Sequence[nn.Module]] = "auto",
    reshard_after_forward: bool | int = True,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    replicate_params: set[nn.Parameter] | None = None,
    param_mp_policies: Mapping[nn.Parameter, MixedPrecisionPolicy] | None = None,
    main_grads: bool = False,
) -> nn.Module:
    """Shard a whole model: ``fully_shard`` on each unit, then on the root. Returns ``model``.

    ``units="auto"`` finds them: each block of every repeated ``ModuleList``/``Sequential``, and what stands before and
    after the blocks (embedding; norm and head) as units of their own unless their weights are tied, since a root bucket
    that holds both stays gathered through the whole step. Otherwise ``units`` lists them, each a module or a list of
    modules. ``reshard_after_forward`` holds for every unit, the root included. The rest is as in ``fully_shard``.
    """
    if mesh is None:
        mesh = resolve_mesh(None, device_type_of(model.parameters()))
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
            replicate_params=replicate_params,
            param_mp_policies=param_mp_policies,
            main_grads=main_grads,
        )
    return model


def _reshards(
    asked: bool | int | None, mesh: DeviceMesh, placed: Iterable[Placed]
) -> tuple[bool | None, int | None]:
    """Whether to reshard (None: not said), and to how many ranks if not to all."""
    if asked is None or isinstance(asked, bool):
        return asked, None
    where = {"the mesh": mesh.size(mesh.ndim - 1)}
    where |= {f"the mesh of parameter {p.found.name!r}": p.mesh.size(p.mesh.ndim - 1) for p in placed}
    for what, shards in where.items():
        if not isinstance(asked, int) or asked < 1 or (shards > asked and shards % asked):
            raise ValueError(
                "reshard_after_forward should be a bool, None, or an int that divides the shard size of the mesh; got "
                f"{asked!r}, and {what} has {shards}"
            )
    most = max(where.values())
    if asked > most:
        raise ValueError(
            f"reshard_after_forward={asked} asks for more ranks than the {most} that shard the parameters; give a "
            "divisor of that"
        )
    return asked != 1, None if asked in (1, most) else asked


def _check_options(
    offload_policy: Any, replicate_params: Iterable[Any], param_mp_policies: Mapping[Any, MixedPrecisionPolicy]
) -> None:
    if not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(f"offload_policy is an OffloadPolicy or CPUOffloadPolicy, got {offload_policy!r}")
    for name, params in (("replicate_params", replicate_params), ("param_mp_policies", param_mp_policies)):
        for p in params:
            if not isinstance(p, nn.Parameter):
                raise TypeError(f"{name} holds parameters of the module, got a {type(p).__name__}")


def _attach(unit: Unit, found: Sequence[FoundParam]) -> None:
    """Put the sharded parameters in place of the full ones, and let their modules read through the unit."""
    original = {id(f.owners): f.param for f in found}
    for bucket in unit.buckets:
        bucket.unit = unit
        for i, slot in enumerate(bucket.slots):
            original[id(slot.owners)]._fxshard_slot = (unit, bucket, i)  # type: ignore[attr-defined]
            for owner, attr in slot.owners:
                point_to(owner, attr, unit, bucket, i)
            for owner, _ in slot.owners:
                if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
                    owner.sparse = False  # a reduce-scatter sends dense gradients
    point_references(unit.modules, unit)
    for module in unit.modules:
        swap_class(module, unit, runs_unit=True)
        module._fxshard_unit = unit  # type: ignore[assignment]
    for f in found:
        ReplacedParameter.retire(f.param, f.name)
