"""``distribute``: carry a ``DistributionPlan`` out with fxshard's own sharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard.discover import device_type_of
from fxshard.distributed import DistributionPlan, set_distribution_plan
from fxshard.distributed.plan import check_unrecorded
from fxshard.mesh import resolve_mesh, split_mesh
from fxshard.sharding import fully_shard, shard

EXPERTS = "experts"
"""The name under which a mixture's layer holds its routed experts, in transformers and most others."""


def distribute(
    model: nn.Module,
    plan: DistributionPlan,
    mesh: DeviceMesh | None = None,
    *,
    experts: Sequence[nn.Module] | None = None,
    **options: Any,
) -> nn.Module:
    """Place a whole model over the ranks of a run as ``plan`` says, and record the plan on it. Returns ``model``.

    * ``plan.dense == "fsdp"``: parameters are sharded over all ranks; "replicate": every rank keeps them whole and
      gradients are all-reduced, one buffer a unit.
    * ``plan.ep_size > 1``: the parameters of routed experts are sharded over groups of ``ep_size`` neighbouring ranks,
      and each shard is replicated ``plan.edp`` times. Experts are gathered within their group when they are used;
      tokens stay on their rank, so any routing trains to the numbers of one process. All experts of a layer are a unit.

    Args:
        mesh: 1-D, of ``plan.world_size`` ranks. None: the world, or this process alone.
        experts: the modules that hold routed experts. None: every module that is registered under the name
            ``experts``, outermost ones only, as the layers of transformers' mixtures register theirs.
        options: those of ``fxshard.shard``: ``units``, ``reshard_after_forward``, ``mp_policy``, ...

    Collective over the mesh. Raises ``ValueError`` for a mesh of other than 1 dim or ``plan.world_size`` ranks, and if
    ``ep_size > 1`` finds no experts or is given modules that are not the model's; ``RuntimeError`` if a plan is
    recorded already; what ``shard`` raises.
    """
    if not isinstance(plan, DistributionPlan):
        raise ValueError(f"distribute carries out a DistributionPlan, got {plan!r}")
    check_unrecorded(model, plan)
    mesh = resolve_mesh(mesh, device_type_of(model.parameters()))
    if mesh.ndim != 1 or mesh.size() != plan.world_size:
        raise ValueError(
            f"the plan is for world_size={plan.world_size}, but the mesh has shape {tuple(mesh.shape)}; give a mesh of "
            "1 dim with that many ranks, or a plan for those of the mesh"
        )
    if plan.is_expert_parallel:
        groups = split_mesh(mesh, plan.ep_size)
        kept = {k: v for k, v in options.items() if k != "units"}
        for module in _experts(model, experts):
            unit = list(module) if isinstance(module, nn.ModuleList) else module
            fully_shard(unit, mesh=groups, **{"reshard_after_forward": True, **kept})
    shard(model, mesh if plan.is_fsdp_dense else split_mesh(mesh, 1), **options)
    set_distribution_plan(model, plan)
    return model


def _experts(model: nn.Module, given: Sequence[nn.Module] | None) -> list[nn.Module]:
    modules = dict(model.named_modules())
    if given is not None:
        inside = {id(m) for m in modules.values()}
        for i, module in enumerate(given):
            if id(module) not in inside:
                raise ValueError(f"experts[{i}], a {type(module).__name__}, is no module of {type(model).__name__}")
        return list(given)
    named = [name for name in modules if name.rpartition(".")[2] == EXPERTS]
    outermost = [n for n in named if not any(n.startswith(f"{other}.") for other in named)]
    if not outermost:
        raise ValueError(
            f"the plan shards routed experts, but {type(model).__name__} has no module named {EXPERTS!r}; name the "
            "modules that hold them: distribute(model, plan, experts=[...])"
        )
    return [modules[name] for name in outermost]
