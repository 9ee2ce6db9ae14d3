"""Ranks that fail, leave, die or hang: every rank ends within the timeout, and says which rank it was and where.

``python tests/distributed/faults.py`` draws such runs at random; ``pytest -m slow`` runs many of them.
"""

from __future__ import annotations

import time
from datetime import timedelta

import faults
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxshard
from fxshard.distributed import distributed_run

SHORT = 4.0  # seconds, of the group, where the run lasts as long: eager code on few ranks


def ends_well(run: faults.Run, timeout: float) -> list[faults.Ended]:
    ended = faults.execute(run.world, faults.train, run, timeout)
    wrong = faults.problems(run, ended)
    assert not wrong, "\n".join([*wrong, *(f"--- rank {r}: {e.code}\n{e.text}" for r, e in enumerate(ended))])
    return ended


@pytest.mark.parametrize(
    "kind, point, form, timeout, most",
    [
        ("raise", "backward", "eager", 40.0, 20.0),
        pytest.param("raise", "compile", "compiled", 40.0, 20.0, marks=pytest.mark.slow),
        ("die", "forward", "eager", 40.0, 20.0),
        ("hang", "optimizer", "eager", SHORT, 40.0),
        ("exit", "data", "eager", SHORT, 40.0),
    ],
)
def test_a_fault_of_one_rank_ends_every_rank(kind: str, point: str, form: str, timeout: float, most: float) -> None:
    """``timeout``: seconds, of the group, which a raise or a death does not wait for; ``most``: until the last end."""
    run = faults.Run(0, 2, form, kind, point, rank=1, step=0 if form == "compiled" else 1)
    assert max(e.seconds for e in ends_well(run, timeout)) < most


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_a_random_fault_ends_every_rank(seed: int) -> None:
    ends_well(faults.Run.of(seed), faults.TIMEOUT)


# -- ranks that go different ways --------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Two ways of the same size; ``left`` says which."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.left = True

    def forward(self, x: Tensor) -> Tensor:
        return self.ways[0 if self.left else 1](x)


def compile_alone(folder: str) -> None:
    """Rank 0 runs the graph that it has, rank 1 captures another."""
    with distributed_run(timeout=timedelta(seconds=50), device="cpu") as state:
        model = fxshard.shard(Branches())
        function = torch.compile(model, backend="fxshard", options={"codegen": "eager", "agree_seconds": 2})
        function(torch.ones(4, 8)).sum().backward()
        model.left = state.rank == 0
        function(torch.ones(4, 8)).sum().backward()


def test_a_schedule_that_one_rank_alone_compiles_ends_every_rank() -> None:
    first, second = faults.execute(2, compile_alone)
    assert first.code == second.code == 1
    for each in (first, second):
        assert "rank 1 failed first, at distributed/test_faults.py" in each.text
        assert "ranks [1] compiled a graph with a schedule of collectives that is new to the run" in each.text
        assert "ranks [0] did not within 2 s" in each.text
        assert each.seconds < 40


def finish_late(folder: str) -> None:
    """Rank 1 is still busy when rank 0 has waited long enough at the end of the run."""
    with distributed_run(timeout=timedelta(seconds=1), device="cpu") as state:
        if state.rank == 1:
            time.sleep(2)


@pytest.mark.slow
def test_a_rank_that_is_late_at_the_end_is_named_and_may_finish() -> None:
    for each in faults.execute(2, finish_late):
        assert each.code == 0 and "not every rank reached the end of the run" in each.text
        assert "rank 1 is alive, at distributed/test_faults.py" in each.text


def never_finish(folder: str) -> None:
    with distributed_run(timeout=timedelta(seconds=1), device="cpu") as state:
        if state.rank == 1:
            faults.hang()


@pytest.mark.slow
def test_a_rank_that_never_comes_to_the_end_is_ended() -> None:
    first, second = faults.execute(2, never_finish)
    assert first.code == 0 and "rank 1 is alive, at distributed/faults.py" in first.text
    assert second.code == 1 and "another rank left the run" in second.text and "in hang" in second.text
    assert second.seconds < 10


def end_well(folder: str) -> None:
    with distributed_run(timeout=timedelta(seconds=5), device="cpu"):
        dist.barrier()


def test_a_run_without_a_fault_says_nothing() -> None:
    for each in faults.execute(3, end_well):
        assert (each.code, each.text) == (0, "")
