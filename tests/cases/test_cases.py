"""Every case, sharded, equals its oracle. By default on two ranks: all of them eagerly, a selection compiled.

``pytest -m slow tests/cases`` runs all of them in every form, on one, two and four ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
from case_harness import CASES, FORMS
from ranks import RankPool, run_processes
from run import merged, run_named


def on(ranks: int, fast: bool = False) -> list[str]:
    return [c.name for c in CASES.values() if ranks in c.ranks and (c.fast or not fast) and not c.needs]


def check(pool: RankPool, name: str, form: str) -> None:
    outcome = merged(pool.run(run_named, name, form))
    assert outcome.good, outcome.text


@pytest.mark.parametrize("name", on(2))
def test_two_ranks_run_eagerly_equal_one_process(ranks2: RankPool, name: str) -> None:
    check(ranks2, name, "eager")


@pytest.mark.parametrize("name", on(2, fast=True))
def test_two_ranks_compiled_equal_one_process(ranks2: RankPool, name: str) -> None:
    check(ranks2, name, "fx")


@pytest.fixture(scope="module", params=[(n, form) for n in (1, 2, 4) for form in FORMS], ids=lambda p: f"{p[0]}-{p[1]}")
def job(request: Any) -> Any:
    """A number of ranks and a form, and the pool to run it; a rank may wait long for another one that compiles."""
    ranks, form = request.param
    slow = form == "inductor"
    pool = RankPool(ranks, group_timeout=120.0 if slow else 20.0, deadline=400.0 if slow else 120.0)
    yield ranks, form, pool
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_every_form_on_every_number_of_ranks(job: Any, name: str) -> None:
    ranks, form, pool = job
    if ranks not in CASES[name].ranks:
        pytest.skip(f"{name} says nothing about {ranks} ranks")
    if CASES[name].needs:
        pytest.importorskip(CASES[name].needs)
    check(pool, name, form)


def fail_on_the_last_rank(form: str) -> None:
    import torch
    import torch.distributed as dist
    from case_harness import Sharded, Tower

    dist.init_process_group("gloo")

    class Failing(Tower):
        def forward(self, x: torch.Tensor, fail: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if bool(fail):
                raise ValueError("poisoned sample")
            return super().forward(x)

    around = Sharded(form)
    model = around.compile(around.shard(Failing()))
    for step in range(3):
        fail = torch.tensor(step == 1 and around.rank == around.world - 1)
        model(torch.randn(4, 6), fail).sum().backward()


@pytest.mark.parametrize("form", ["eager", pytest.param("fx", marks=pytest.mark.slow)])
def test_an_error_on_one_rank_ends_all_of_them(form: str) -> None:
    ended = run_processes(fail_on_the_last_rank, 2, form, deadline=90)
    assert [e.code for e in ended] == [1, 1]
    assert (ended[1].exception, ended[1].message) == ("ValueError", "poisoned sample")
    assert "losed by peer" in (ended[0].message or "")
