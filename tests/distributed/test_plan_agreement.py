"""Ranks compare what they compiled: equal plans pass, others end on every rank with the difference, nothing hangs."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from outcomes import outcome, replaced
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxshard
from fxshard import _torch, agreement, plan_agreement
from fxshard.inspect.record import Recorder
from fxshard.mesh import groups_of


class Branches(nn.Module):
    """Two ways of the same size; ``left`` says which."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.left = True

    def forward(self, x: Tensor) -> Tensor:
        return self.ways[0 if self.left else 1](x)


def sharded(mesh: DeviceMesh | None = None, width: int = 8) -> Any:
    return fxshard.shard(Branches(width), mesh)


def step(compiled: Any, rows: int = 4, width: int = 8) -> float:
    loss = compiled(torch.ones(rows, width)).sum()
    loss.backward()
    return loss.item()


def compiled(model: Any, **options: Any) -> Any:
    options = {"codegen": "eager", "agree_seconds": 20, **options}
    return torch.compile(model, backend="fxshard", options=options, dynamic=False)


# -- ranks that differ -------------------------------------------------------------------------------------------------


def other_options() -> tuple[str, Any]:
    return outcome(step, compiled(sharded(), prefetch=dist.get_rank()))


def test_other_options_on_a_rank_end_on_every_rank_with_the_difference(ranks2: RankPool) -> None:
    for kind, message in ranks2.run(other_options, deadline=60):
        assert kind == "BackendCompilerFailed"
        assert "ranks [1] compiled another schedule of collectives than ranks [0]" in message
        assert "--- ranks [0]\n+++ ranks [1]\n" in message
        changed = [line for line in message.splitlines() if "codegen" in line]
        assert [line[:6] for line in changed] == ["-torch", "+torch"]
        assert "prefetch 0" in changed[0] and "prefetch 1" in changed[1]


def other_branch() -> tuple[str, Any]:
    model = sharded()
    model.left = dist.get_rank() == 0
    return outcome(step, compiled(model))


def check_branches(answers: list[tuple[str, Any]], other: list[int]) -> None:
    for kind, message in answers:
        assert kind == "BackendCompilerFailed"
        assert f"ranks {other} compiled another schedule of collectives than ranks [0]" in message
        removed = [line for line in message.splitlines() if line.startswith("-") and "ways.0.weight" in line]
        added = [line for line in message.splitlines() if line.startswith("+") and "ways.1.weight" in line]
        assert len(removed) == len(added) == 1


def test_another_branch_on_a_rank_names_rank_and_parameters(ranks2: RankPool) -> None:
    check_branches(ranks2.run(other_branch, deadline=60), [1])


@pytest.mark.slow
def test_another_branch_on_three_of_four_ranks_names_them(ranks4: RankPool) -> None:
    check_branches(ranks4.run(other_branch, deadline=60), [1, 2, 3])


def other_order_unfused() -> tuple[str, Any]:
    class Both(Branches):
        def forward(self, x: Tensor) -> Tensor:
            first, second = self.ways if self.left else reversed(self.ways)
            return first(x) + second(x)

    model = fxshard.fully_shard(Both())
    model.left = dist.get_rank() == 0
    return outcome(step, compiled(model, fuse=False))


def test_another_order_of_unfused_collectives_is_a_difference(ranks2: RankPool) -> None:
    for kind, message in ranks2.run(other_order_unfused, deadline=60):
        assert kind == "BackendCompilerFailed" and "ranks [1] compiled another schedule" in message


def late(seconds: float) -> tuple[tuple[str, Any], float]:
    function = compiled(sharded(width=6), agree_seconds=1)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(seconds)
    began = time.monotonic()
    return outcome(step, function, 4, 6), time.monotonic() - began


def test_a_rank_that_does_not_come_is_named_and_gets_the_same_error_if_it_comes_later(ranks2: RankPool) -> None:
    for (kind, message), seconds in ranks2.run(late, 3.0, deadline=60):
        assert kind == "BackendCompilerFailed" and seconds < 5
        assert "ranks [0] compiled a graph with a schedule of collectives that is new to the run" in message
        assert "ranks [1] did not within 1 s" in message and "agree_seconds" in message


def other_graph_of_those_known() -> list[tuple[str, Any]]:
    model = sharded()
    function = compiled(model)
    for left in (True, False):
        model.left = left
        step(function)
    model.left = dist.get_rank() == 0
    wrong = outcome(step, function)
    return [wrong, outcome(step, function)]


def test_ranks_that_run_different_graphs_of_those_agreed_on_hear_of_it_one_step_later(ranks2: RankPool) -> None:
    """The collectives are of equal sizes, so nothing else would ever tell."""
    for rank, (wrong, later) in enumerate(ranks2.run(other_graph_of_those_known, deadline=60)):
        assert wrong[0] == "value"
        assert later[0] == "RuntimeError" and "ranks ran different compiled graphs" in later[1]
        assert f"rank {rank} ran, at last, regather ways.{rank}, reduce ways.{rank}. " in later[1]


# -- ranks that may differ ---------------------------------------------------------------------------------------------


def recompile_alone() -> tuple[int, list[float]]:
    """How many graphs were compiled, and the loss of each step by row."""
    recorder = Recorder({"codegen": "eager", "agree_seconds": 1})
    function = torch.compile(sharded(), backend=recorder, dynamic=False)
    rows = [4, 6 if dist.get_rank() else 4, 4]
    losses = [step(function, n) / n for n in rows]
    return len(recorder.captures), losses


def test_a_rank_may_recompile_alone_where_its_schedule_stays_the_same(ranks2: RankPool) -> None:
    (compiled_by_first, first), (compiled_by_second, second) = ranks2.run(recompile_alone, deadline=60)
    assert (compiled_by_first, compiled_by_second) == (1, 2), "only the rank with another batch size compiled twice"
    assert first == pytest.approx(second)


def switched_off() -> list[float]:
    function = compiled(sharded(), prefetch=dist.get_rank(), agree=False)
    return [step(function) for _ in range(2)]


def test_ranks_with_other_plans_train_where_the_comparison_is_off(ranks2: RankPool) -> None:
    first, second = ranks2.run(switched_off, deadline=60)
    assert first == second


def stages() -> list[float]:
    stage = dist.get_rank() // 2
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    model = sharded(meshes[stage])
    model.left = stage == 0
    function = compiled(model, prefetch=stage)
    return [step(function) for _ in range(2)]


@pytest.mark.slow
def test_pipeline_stages_with_meshes_of_their_own_agree_within_themselves(ranks4: RankPool) -> None:
    values = ranks4.run(stages, deadline=60)
    assert values[0] == values[1] and values[2] == values[3] and values[0] != values[2]


def count_comparisons(inside_eager_code: bool) -> list[int]:
    asked: list[int] = [0]

    def counted(self: Any) -> None:
        asked[0] += 1
        original(self)

    original = plan_agreement._Comparison.run
    with replaced(plan_agreement._Comparison, "run", counted):
        model = sharded()
        if inside_eager_code:
            model.ways[0].compile(backend="fxshard", options={"codegen": "eager"})
        function = model if inside_eager_code else compiled(model)
        seen = []
        for _ in range(3):
            step(function)
            seen.append(asked[0])
    return seen


def test_a_graph_is_compared_once_with_its_backward_and_a_step_never(ranks2: RankPool) -> None:
    assert ranks2.run(count_comparisons, False, deadline=60) == [[1, 1, 1]] * 2


def test_graphs_inside_eager_code_are_left_to_the_agreement_of_eager_collectives(ranks2: RankPool) -> None:
    assert ranks2.run(count_comparisons, True, deadline=60) == [[0, 0, 0]] * 2


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_comparison_without_time_is_refused(seconds: int) -> None:
    with pytest.raises(ValueError, match=f"'agree_seconds' is at least 1, got {seconds}"):
        Recorder({"agree_seconds": seconds})(torch.fx.symbolic_trace(nn.Identity()), [torch.ones(1)])


# -- what travels ------------------------------------------------------------------------------------------------------


def test_nothing_that_is_received_is_unpickled_freely() -> None:
    objects = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list")
    texts = {file.name: file.read_text() for file in Path(fxshard.__path__[0]).rglob("*.py")}
    assert len(texts) > 40 and "agreement.py" in texts
    assert [(file, name) for file, text in texts.items() for name in objects if name in text] == []
    loads = [call[:90] for text in texts.values() for call in text.split("torch.load(io")[1:]]
    assert loads and all("weights_only=True" in call for call in loads)


def announce(launches: int) -> list[list[int]]:
    """Two ranks, whose compiled fragments have other collectives, come to all of them on both."""
    joined: list[list[int]] = []
    model = sharded()
    units = model._fxshard_unit.scope.units
    buckets = [b for unit in units for b in unit.buckets]
    mesh = buckets[0].slots[0].cut.mesh

    def join(kind: agreement.Kind, bucket: Any) -> None:
        joined.append([int(kind), buckets.index(bucket)])

    agreed = agreement.Agreement(buckets, mesh, join, lambda: None)
    phase = agreement.Phase([])
    if dist.get_rank() == 1:
        agreed.want(phase, [(agreement.Kind.GATHER, bucket) for bucket in buckets[:launches]])
    agreed.finish(phase)
    return joined


def test_a_list_of_collectives_that_a_rank_announces_reaches_the_others_as_numbers(ranks2: RankPool) -> None:
    first, second = ranks2.run(announce, 2, deadline=60)
    assert first == [[0, 0], [0, 1]] and second == []


# -- groups ------------------------------------------------------------------------------------------------------------


def train_beside_groups_of_some_ranks() -> list[float]:
    for _ in range(2):
        dist.new_group([1])  # rank 1 then knows two groups more than rank 0
    models = [sharded(), sharded()]
    return [step(model) for model in models]


def test_ranks_that_are_in_other_numbers_of_groups_shard_a_model(ranks2: RankPool) -> None:
    """torch names a group that its members alone make by how many they know, and they would wait in vain."""
    first, second = ranks2.run(train_beside_groups_of_some_ranks, deadline=60)
    assert first == second


# -- how long collectives wait -----------------------------------------------------------------------------------------


def timeouts() -> set[timedelta | None]:
    mesh = init_device_mesh("cpu", (2, 2))
    groups = groups_of(mesh)
    names = (groups.gather, groups.reduce, groups.replicate)
    made = [dist.distributed_c10d._resolve_process_group(name) for name in names if name is not None]
    assert len(made) == 3
    return {_torch.group_timeout(group, "cpu") for group in [*made, agreement.control_group(mesh)]}


def test_collectives_over_every_group_of_a_mesh_wait_as_long_as_the_run_says(ranks4: RankPool) -> None:
    """torch would let those over a new group wait for 30 minutes."""
    assert ranks4.run(timeouts, deadline=60) == [{timedelta(seconds=ranks4.group_timeout)}] * 4
