"""Where a model lies over a run, recorded on the model itself. Nothing here communicates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fxshard.distributed.queries import is_distributed_run, is_fsdp2_model, size

# A plain attribute of every module: no state_dict entry, and class swaps and deep copies keep it.
_PLAN = "_fxshard_distribution_plan"
# Left by fxshard's own sharding on each module whose parameters it took over.
_UNIT = "_fxshard_unit"


@dataclass(frozen=True)
class DistributionPlan:
    """How a model is placed over the ranks of a run.

    world_size: ranks that hold the model; data parallelism spans them all. ep_size: expert-parallel degree, routed
    experts are sharded over groups of that many ranks, 1 shards none. dense: everything else, "replicate" (a whole copy
    on each rank) or "fsdp" (sharded by FSDP2). ValueError names the field and the value of an impossible plan.
    """

    world_size: int = 1
    ep_size: int = 1
    dense: Literal["replicate", "fsdp"] = "replicate"

    def __post_init__(self) -> None:
        for name, value in (("world_size", self.world_size), ("ep_size", self.ep_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"DistributionPlan.{name} must be a positive int, got {value!r}")
        if self.world_size % self.ep_size:
            raise ValueError(
                f"DistributionPlan.ep_size must divide world_size, got ep_size={self.ep_size} and "
                f"world_size={self.world_size}"
            )
        if self.dense not in ("replicate", "fsdp"):
            raise ValueError(f"DistributionPlan.dense must be 'replicate' or 'fsdp', got {self.dense!r}")

    @property
    def edp(self) -> int:
        """How many ranks hold a replica of each expert shard."""
        return self.world_size // self.ep_size

    @property
    def is_expert_parallel(self) -> bool:
        """True if routed experts are sharded."""
        return self.ep_size > 1

    @property
    def is_fsdp_dense(self) -> bool:
        """True if everything but routed experts is sharded by FSDP2."""
        return self.dense == "fsdp"


torch.serialization.add_safe_globals([DistributionPlan])


def set_distribution_plan(model: nn.Module, plan: DistributionPlan) -> None:
    """Record `plan` on `model` and on every submodule that it has now. A model is recorded once.

    RuntimeError, with nothing recorded anywhere, if any of these modules already has a plan (an equal one included, and
    a deep copy keeps its original's), or if `plan.world_size` is not the size of a live run of several ranks.
    Without a group, and in a group of one, any size is recorded.
    """
    if not isinstance(plan, DistributionPlan):
        raise ValueError(f"set_distribution_plan records a DistributionPlan, got {plan!r}")
    # First all reads, then all writes: torch.compile's wrapper forwards both to the module inside, and both are listed.
    check_unrecorded(model, plan)
    for module in model.modules():
        setattr(module, _PLAN, plan)


def check_unrecorded(model: nn.Module, plan: DistributionPlan) -> None:
    """``RuntimeError`` if ``set_distribution_plan`` would raise one."""
    for name, module in model.named_modules():
        recorded = getattr(module, _PLAN, None)
        if recorded is not None:
            raise RuntimeError(
                f"{_describe(model, name)} already records {recorded}, so {plan} is not recorded; record one plan, "
                "once, on a model that was not recorded or copied from a recorded one"
            )
    if is_distributed_run() and plan.world_size != size():
        raise RuntimeError(
            f"the plan is for world_size={plan.world_size}, but this run has {size()} ranks; record a plan made for "
            "the live run"
        )


def distribution_plan(model: nn.Module) -> DistributionPlan:
    """The plan recorded on exactly this module, whatever the live run; `DistributionPlan()` if none was in one process.

    RuntimeError for a module without a plan if something in it is sharded, or in a run of several ranks: a module added
    to a recorded model has no plan of its own, read it off that model. A launch whose group is not set up counts as one
    process: it is still alone with its own model.
    """
    recorded = getattr(model, _PLAN, None)
    if recorded is not None:
        return recorded
    if is_fsdp2_model(model) or any(getattr(module, _UNIT, None) is not None for module in model.modules()):
        raise RuntimeError(
            f"{type(model).__name__} is sharded but records no plan; call set_distribution_plan on it right after "
            "sharding"
        )
    if is_distributed_run():
        raise RuntimeError(
            f"{type(model).__name__} records no plan in a run of {size()} ranks; a module added after recording has "
            "none, read the plan off the model this module was added to"
        )
    return DistributionPlan()


def _describe(model: nn.Module, name: str) -> str:
    root = type(model).__name__
    return f"submodule {name!r} of {root}" if name else root
