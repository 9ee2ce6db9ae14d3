"""Gradients of several micro-batches: without communication, and with the all-reduce delayed."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from micro_steps import Net, Trained, answer, batch, collectives, mesh_of, set_flags, train
from ranks import RankPool
from torch import nn
from training import compiled, full

import fxshard
from fxshard.unit import units_of

Plain = Callable[[Sequence[Sequence[str]]], Trained]
UNFUSED = pytest.param("fx-unfused", marks=pytest.mark.slow)
FORMS = ("eager", "fx", UNFUSED)


def counts(log: Sequence[tuple[str, int]]) -> Counter[str]:
    return Counter(op for op, _ in log)


WAIT = [["wait", "wait", "sync"], ["wait", "sync"]]
PARK = [["park", "park", "sync"], ["park", "sync"]]
MIXED = [["wait", "park", "sync"], ["park", "wait", "sync"], ["sync"], ["wait", "wait", "park", "sync"]]


@pytest.mark.parametrize("form", FORMS)
def test_what_waits_is_summed_by_the_next_reduction(ranks2: RankPool, plain: Plain, form: str) -> None:
    plain(WAIT).compare(answer(ranks2.run(train, form, (2,), WAIT)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "script", [pytest.param(PARK, id="park", marks=pytest.mark.slow), pytest.param(MIXED, id="mixed")]
)
def test_segments_wait_for_the_all_reduce(ranks4: RankPool, plain: Plain, form: str, script: Any) -> None:
    plain(script).compare(answer(ranks4.run(train, form, (2, 2), script)))


@pytest.mark.parametrize("form", ("eager", pytest.param("fx", marks=pytest.mark.slow)))
def test_segments_wait_where_there_are_no_replicas_too(ranks2: RankPool, plain: Plain, form: str) -> None:
    plain(MIXED).compare(answer(ranks2.run(train, form, (2,), MIXED)))


@pytest.mark.slow
def test_generated_code_accumulates_the_same(ranks4: RankPool, plain: Plain) -> None:
    script = [["wait", "park", "sync"], ["wait", "park", "sync"]]
    plain(script).compare(answer(ranks4.run(train, "fx-inductor", (2, 2), script)))


@pytest.mark.parametrize("form", (pytest.param("eager", marks=pytest.mark.slow), "fx"))
def test_each_stage_has_the_collectives_it_needs_and_no_others(ranks4: RankPool, form: str) -> None:
    got = answer(ranks4.run(_train_and_log, form, (2, 2), [["wait", "park", "sync"]] * 2))
    reductions = [counts(log) - Counter(all_gather=10**6) for log in got.logs]
    units = 3
    assert reductions == [{}, {"reduce_scatter": units}, {"reduce_scatter": units, "all_reduce": units}]
    assert got.graded == [False, False, True] * 2
    params = len(got.grads[0])
    assert got.waiting == [params, params, 0] * 2


def _train_and_log(form: str, shape: Sequence[int], script: Any) -> Trained:
    return train(form, shape, script, log=True)


def parked_values(form: str) -> list[list[float]]:
    """Reduce-scatter gives (4, 6), then (2, 2), then (2, 2) on every rank: the mean over shards of these gradients."""
    model: Any = nn.Linear(1, 4, bias=False)
    mesh = mesh_of((2, 2))
    fxshard.fully_shard(model, mesh=mesh)
    step, seen = compiled(model, form), []
    own = slice(2 * mesh.get_local_rank("shard"), 2 * mesh.get_local_rank("shard") + 2)
    for values, flag in (((4.0, 6.0), "park"), ((2.0, 2.0), "park"), ((2.0, 2.0), "sync")):
        set_flags(model, flag)
        weights = torch.tensor(values).repeat(2)
        (step(torch.ones(1, 1)) * weights).sum().backward()
        (bucket,) = model._fxshard_unit.buckets
        waiting = bucket.unreduced._waiting.get("shard")
        seen.append((waiting.buffer if waiting is not None else full(model.weight.grad)[own]).flatten().tolist())
    return seen


@pytest.mark.parametrize("form", ("eager", "fx"))
def test_partials_add_up_and_are_empty_after_the_synchronised_step(ranks4: RankPool, form: str) -> None:
    for seen in ranks4.run(parked_values, form):
        assert seen == [[4, 6], [6, 8], [8, 10]]


def addresses(form: str, flag: str) -> list[int]:
    torch.manual_seed(0)
    model: Any = fxshard.shard(Net(), mesh_of((2,)))
    step, seen = compiled(model, form), []
    stage = "none" if flag == "wait" else "shard"
    for number in range(3):
        set_flags(model, flag)
        x, y = batch(number)
        ((step(x) - y) ** 2).mean().backward()
        seen += [b.unreduced._waiting[stage].buffer.data_ptr() for u in units_of(model) for b in u.buckets]  # type: ignore[index]
    return seen


@pytest.mark.parametrize("flag", ("wait", "park"))
@pytest.mark.parametrize("form", ("eager", "fx"))
def test_what_waits_stays_in_one_buffer_a_bucket(ranks2: RankPool, form: str, flag: str) -> None:
    for seen in ranks2.run(addresses, form, flag):
        third = len(seen) // 3
        assert seen[:third] == seen[third : 2 * third] == seen[2 * third :]


def recompiles_after_the_first_cycle(script: Any) -> int:
    torch.manual_seed(0)
    model: Any = fxshard.shard(Net(), mesh_of((2,)))
    step = compiled(model, "fx")
    for cycle in range(3):
        with torch._dynamo.config.patch(error_on_recompile=cycle == 2):
            for number, flag in enumerate(script):
                set_flags(model, flag)
                x, y = batch(number)
                ((step(x) - y) ** 2).mean().backward()
    return torch._dynamo.utils.counters["graph_break"].total()


def test_after_the_first_cycles_nothing_is_compiled_again(ranks2: RankPool) -> None:
    assert ranks2.run(recompiles_after_the_first_cycle, ["wait", "park", "sync"]) == [0, 0]


class Turns(nn.Module):
    """Two parameters of equal size in one bucket; ``first`` says which is used."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 4, bias=False)
        self.two = nn.Linear(3, 4, bias=False)
        self.first = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one if self.first else self.two)(x)


def turns(form: str, shape: Sequence[int], flag: str) -> dict[str, torch.Tensor | None]:
    torch.manual_seed(0)
    model: Any = Turns()
    if form != "plain":
        model = fxshard.fully_shard(model, mesh=mesh_of(shape))
    step = compiled(model, form if form != "plain" else "eager")
    for number in range(3):
        model.first = number != 1
        if form != "plain":
            set_flags(model, flag if number < 2 else "sync")
        step(torch.full((2, 3), number + 1.0)).sum().backward()
    return {k: full(p.grad) for k, p in model.named_parameters()}


@pytest.mark.parametrize("flag", ("wait", "park"))
@pytest.mark.parametrize("form", ("eager", "fx"))
def test_a_changed_set_of_parameters_does_not_mix_what_waits(ranks4: RankPool, form: str, flag: str) -> None:
    wanted = turns("plain", (), flag)
    for got in ranks4.run(turns, form, (2, 2), flag):
        torch.testing.assert_close(got, wanted)


def stepped_too_early() -> list[str]:
    model: Any = fxshard.fully_shard(nn.Linear(3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    for flag in ("wait", "wait", "sync"):
        set_flags(model, flag)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.ones(2, 3)).sum().backward()
        said += [str(w.message) for w in caught if "waited" in str(w.message)]
        for p in model.parameters():
            p.grad = fxshard.LayoutTensor.from_local_slab(torch.ones_like(p._local_tensor), p._cut)
        optimizer.step()
    return said


def test_an_optimizer_step_while_gradients_wait_is_warned_of(ranks2: RankPool) -> None:
    for said in ranks2.run(stepped_too_early):
        assert len(said) == 2
        assert all("an optimizer step?" in s and "weight" in s for s in said)


def dropped() -> tuple[list[str], list[str], bool]:
    model: Any = fxshard.fully_shard(nn.Linear(3, 4))
    set_flags(model, "wait")
    model(torch.ones(2, 3)).sum().backward()
    before = model.waiting_gradients()
    model.reset_iter_state()
    after = model.waiting_gradients()
    set_flags(model, "sync")
    model(torch.ones(2, 3)).sum().backward()
    return before, after, torch.equal(full(model.bias.grad), torch.full((4,), 2.0))  # type: ignore[arg-type]


def test_reset_drops_what_waits_and_the_next_step_is_right(ranks2: RankPool) -> None:
    assert ranks2.run(dropped) == [(["bias", "weight"], [], True)] * 2


def dtypes_of_what_waits(form: str) -> set[torch.dtype]:
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model: Any = fxshard.fully_shard(nn.Linear(3, 4), mp_policy=policy)
    set_flags(model, "wait")
    with collectives() as log:
        compiled(model, form)(torch.ones(2, 3)).sum().backward()
    assert "reduce_scatter" not in counts(log)
    return {w.buffer.dtype for b in model._fxshard_unit.buckets for w in b.unreduced._waiting.values()}


@pytest.mark.parametrize("form", ("eager", "fx"))
def test_gradients_wait_in_the_reduce_dtype(ranks2: RankPool, form: str) -> None:
    assert ranks2.run(dtypes_of_what_waits, form) == [{torch.float32}] * 2
