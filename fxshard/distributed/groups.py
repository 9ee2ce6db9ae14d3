"""Process groups as values: one group that may be unused, the groups of a model, and the state of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fxshard.distributed import queries
from fxshard.distributed.codec import decode
from fxshard.distributed.envelope import Envelope, attempt, describe
from fxshard.distributed.transport import all_gather_bytes


class DistributedProcessGroup:
    """A process group that may be unused.

    group: a `ProcessGroup`, None for the whole world, or -1 for none. Any other integer counts as unused too, since
    torch hands non-members of a sub-group an integer.
    """

    def __init__(self, group: dist.ProcessGroup | int | None = None) -> None:
        self.group = group

    def is_initialized(self) -> bool:
        """True if the default group exists and this group is in use."""
        return queries.is_initialized() and not isinstance(self.group, int)

    def rank(self) -> int:
        """This process's rank in the group, -1 when not initialised."""
        return queries.rank(self.group) if self.is_initialized() else -1  # type: ignore[arg-type]

    def world_size(self) -> int:
        """The group's size, -1 when not initialised."""
        return queries.size(self.group) if self.is_initialized() else -1  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return (
            f"DistributedProcessGroup(group={self.group!r}, initialized={self.is_initialized()}, "
            f"size={self.world_size()})"
        )

    @staticmethod
    def get_dist_syncd_obj(
        obj: Any,
        groups: DistributedProcessGroup | Iterable[DistributedProcessGroup],
        op: Callable[[list[Any]], Any],
    ) -> Any:
        """`op` of the members' objects, over each group in turn: the result over one group feeds the next.

        `op` gets the list in group-rank order, copies with tensors on the CPU. A group that is not initialised passes
        `obj` through without `op`. Collective over each group in turn.

        If an object cannot be sent, or `op` raises, that member raises the error and the members of this and of later
        groups that it was to feed raise `RuntimeError`; each still joins its later groups, so that nobody waits there.
        """
        label = "get_dist_syncd_obj"
        failure: BaseException | None = None
        for wrapper in [groups] if isinstance(groups, DistributedProcessGroup) else groups:
            if not wrapper.is_initialized():
                continue
            if failure is None:
                sent, failure = attempt(label, lambda obj=obj: obj)  # type: ignore[misc]
            else:
                sent = Envelope(label, "error", f"an earlier group failed with {describe(failure)}")
            got = [Envelope.unpack(data) for data in all_gather_bytes(sent.pack(), wrapper.group)]  # type: ignore[arg-type]
            failed = [member for member, each in enumerate(got) if each.status != "ok"]
            if failure is not None:
                continue
            if failed:
                failure = RuntimeError(f"{label}: member {failed[0]} of {wrapper} failed: {got[failed[0]].detail}")
                continue
            try:
                obj = op([decode(each.payload) for each in got])
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure
        return obj


class ParallelState:
    """Which groups a model's collectives run on; each argument is a `ProcessGroup`, None for the world, -1 for unused.

    A `DistributionPlan` says where a model lies; neither is derived from the other.
    """

    def __init__(
        self,
        data_parallel_group: dist.ProcessGroup | int | None = None,
        tensor_parallel_group: dist.ProcessGroup | int | None = -1,
        expert_model_parallel_group: dist.ProcessGroup | int | None = -1,
    ) -> None:
        self.data_parallel_group = DistributedProcessGroup(data_parallel_group)
        self.tensor_parallel_group = DistributedProcessGroup(tensor_parallel_group)
        self.expert_model_parallel_group = DistributedProcessGroup(expert_model_parallel_group)

    def __repr__(self) -> str:
        return (
            f"ParallelState(data_parallel_group={self.data_parallel_group}, "
            f"tensor_parallel_group={self.tensor_parallel_group}, "
            f"expert_model_parallel_group={self.expert_model_parallel_group})"
        )


@dataclass
class DistributedState:
    """One process of a run, a single process included (rank 0 of 1). device: where this rank computes."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes the run's outputs."""
        return self.rank == 0
