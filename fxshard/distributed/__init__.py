"""Ranks: what a process knows of its run, and how ranks agree, exchange values and fail together.

In reading order: `queries` (launch and group), `codec` (values as bytes), `transport` (bytes over a group), `envelope`
(how a callable ended), `exchange` (broadcast and reduce of values), `gather`, `groups`, `plan` (where a model lies),
`where` and `watch` (who failed, hangs or is gone), `run` (from set-up to teardown), `layers` (what sharding must know
of a model), `wrap` (FSDP2).

What a rank does, when that is noticed and by what, and the cost of it while all is well:

* It compiles another schedule of collectives than its peers: when it compiles; `fxshard.plan_agreement`. 7 requests to
  the store for each new schedule, nothing in a step.
* It compiles a new schedule and its peers do not: after the option `agree_seconds`; the same.
* It runs another compiled graph than its peers, of those they all have: at the end of the next backward;
  `fxshard.agreement`. Two numbers in the message that a backward sends.
* It runs other eager code inside of a forward: that is no error, ranks take part in each other's collectives;
  `fxshard.agreement`. One round of messages a forward and one a backward.
* It fails in a callable of `all_reduce` or `broadcast_from`: at once; `exchange`. Nothing beside the exchange.
* It raises inside of `distributed_run`: at once; `watch`. A thread that sleeps, nothing in a step.
* It dies, or ends without a word: on gloo at once by a rank that waits for it, else at the timeout of the group or of
  the comparison of plans that waits for it; `watch`.
* It hangs, or leaves by `SystemExit` alone: at that timeout; `watch`.

What `watch` notices ends in a roll call on every rank: which rank failed first, where and with what, where each other
one is, and which gives no answer. A rank that does not notice by itself is ended 3 s later, with its stack on stderr.
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
