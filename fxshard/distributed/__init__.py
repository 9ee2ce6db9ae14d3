"""Ranks: what a process knows of its run, and how ranks agree, exchange values and fail together.

In reading order: `queries` (launch and group), `codec` (values as bytes), `transport` (bytes over a group), `envelope`
(how a callable ended), `exchange` (broadcast and reduce of values), `gather`, `groups`, `plan` (where a model lies),
`run` (from set-up to teardown), `layers` (what sharding must know of a model), `wrap` (FSDP2).
"""

from fxshard.distributed.exchange import all_reduce, broadcast_from
from fxshard.distributed.gather import gather_bytes, gather_state_dicts
from fxshard.distributed.groups import DistributedProcessGroup, DistributedState, ParallelState
from fxshard.distributed.plan import DistributionPlan, distribution_plan, set_distribution_plan
from fxshard.distributed.queries import (
    backend,
    barrier,
    is_available,
    is_distributed_launch,
    is_distributed_run,
    is_fsdp2_model,
    is_initialized,
    is_master,
    rank,
    size,
)
from fxshard.distributed.run import abort as abort
from fxshard.distributed.run import distributed_run
from fxshard.distributed.wrap import fsdp2_wrap

__all__ = [
    "DistributedProcessGroup",
    "DistributedState",
    "DistributionPlan",
    "ParallelState",
    "all_reduce",
    "backend",
    "barrier",
    "broadcast_from",
    "distributed_run",
    "distribution_plan",
    "fsdp2_wrap",
    "gather_bytes",
    "gather_state_dicts",
    "is_available",
    "is_distributed_launch",
    "is_distributed_run",
    "is_fsdp2_model",
    "is_initialized",
    "is_master",
    "rank",
    "set_distribution_plan",
    "size",
]
