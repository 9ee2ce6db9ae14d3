"""Properties of random models: what holds for every graph, and what the fused graph computes."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_models import Block, build, inputs, named_grads, random_spec
from ranks import fake_world, reset_dynamo
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard import capture
from fxshard.inspect.record import Recorder
from fxshard.inspect.schedule import Step
from fxshard.passes.liveness import lifetimes, peak_bytes
from fxshard.passes.lower_layout import CONCAT
from fxshard.passes.rewrite import MARK
from fxshard.passes.schedule_overlap import LAUNCHES
from fxshard.passes.verify import verify
from fxshard.plan import Plan

SEEDS = range(24)


@st.composite
def specs(draw: Any) -> Block:
    return random_spec(lambda options: draw(st.sampled_from(list(options))))


class Graphs:
    """A model compiled in a fake world, forward and backward: its recorder, final graphs and plans."""

    def __init__(self, spec: Block, world: int, replicas: int, rank: int, prefetch: int) -> None:
        self.recorder = Recorder({"codegen": "eager", "prefetch": prefetch})
        self.finished: list[tuple[fx.GraphModule, Plan]] = []
        rewrite = capture.rewrite

        def keep(gm: fx.GraphModule, plan: Plan, *args: Any) -> fx.GraphModule:
            self.finished.append((rewrite(gm, plan, *args), plan))
            return gm

        names = ("replicate", "shard")
        with fake_world(world * replicas, rank), mock.patch.object(capture, "rewrite", keep):
            mesh = init_device_mesh("cpu", (replicas, world), mesh_dim_names=names)
            self.model = build(spec, mesh)
            torch.compile(self.model, backend=self.recorder, fullgraph=True)(*inputs(0)).sum().backward()
        reset_dynamo()

    @property
    def text(self) -> str:
        return self.recorder.plan_text("plan") + self.recorder.schedule_text("schedule")

    @property
    def steps(self) -> list[tuple[Plan, list[Step]]]:
        return [(c.plans[kind], c.steps[kind]) for c in self.recorder.captures for kind in c.plans]


# Shrinking would compile hundreds of models; the example that fails is printed and small as it is.
FEW = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@FEW
@given(specs(), st.integers(2, 8), st.sampled_from([1, 1, 2]), st.integers(0, 3))
def test_every_graph_keeps_the_rules(spec: Block, world: int, replicas: int, prefetch: int) -> None:
    graphs = Graphs(spec, world, replicas, 0, prefetch)
    assert [plan.kind for _, plan in graphs.finished] == ["forward", "backward"]
    for gm, plan in graphs.finished:
        verify(gm, plan)
        assert Plan.from_json(plan.to_json()) == plan
        assert_launches_are_the_planned_ones(gm, plan)
        assert_memory_is_bounded(gm, plan)
    for plan, steps in graphs.steps:
        if prefetch:
            assert_gathers_are_launched_before_the_compute_of_the_unit_before(plan, steps)
    last = Graphs(spec, world, replicas, world * replicas - 1, prefetch)
    assert last.text == graphs.text


def assert_launches_are_the_planned_ones(gm: fx.GraphModule, plan: Plan) -> None:
    there = Counter((LAUNCHES[n.target], n.meta[MARK]) for n in gm.graph.nodes if n.target in LAUNCHES)
    ranks = {"all_gather": "shard_size", "reduce_scatter": "shard_size", "all_reduce": "replicate_size"}
    every = (*plan.gathers, *plan.reductions)
    assert there == Counter((c.op, c.bucket) for c in every if getattr(plan.bucket(c.bucket), ranks[c.op]) > 1)
    assert not any("fxshard" in str(n.target) and n.target is not CONCAT for n in gm.graph.nodes)


def assert_memory_is_bounded(gm: fx.GraphModule, plan: Plan) -> None:
    """Gathered: what is needed and the units ahead. In flight: one unit for each kind of reduction."""
    found = lifetimes(gm.graph, plan)
    of_unit: Counter[tuple[str, str]] = Counter()
    for life in found:
        of_unit[life.op, plan.bucket(life.bucket).unit] += life.nbytes
    largest = {op: max((n for (o, _), n in of_unit.items() if o == op), default=0) for op in LAUNCHES.values()}
    gathers = [life for life in found if life.op == "all_gather"]
    needed = max((sum(g.nbytes for g in gathers if g.waited <= at.waited <= g.end) for at in gathers), default=0)
    gathered, in_flight = peak_bytes(gm.graph, plan)
    assert gathered <= needed + max(plan.prefetch, 1) * largest["all_gather"]
    assert in_flight <= largest["reduce_scatter"] + largest["all_reduce"]


def assert_gathers_are_launched_before_the_compute_of_the_unit_before(plan: Plan, steps: list[Step]) -> None:
    place = {(s.what, s.bucket): i for i, s in enumerate(steps) if s.op == "all_gather"}
    buckets = [s.bucket for s in steps if (s.what, s.op) == ("wait", "all_gather")]
    for before, bucket in itertools.pairwise(buckets):
        if plan.bucket(before).unit != plan.bucket(bucket).unit:
            between = steps[place["wait", before] : place["launch", bucket]]
            assert not any(s.what == "compute" for s in between), (before, bucket)


class ReturnsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.second(self.first(x)), self.second.weight, self.second.weight[1:]


def test_what_a_model_returns_of_its_weights_is_not_taken_for_saved_for_backward(two_ranks: None) -> None:
    recorder = Recorder({"codegen": "eager"})
    step = torch.compile(fxshard.shard(ReturnsItsWeight()), backend=recorder, fullgraph=True)
    sum(out.sum() for out in step(torch.randn(2, 4))).backward()  # type: ignore[union-attr]
    assert [c.op for c in recorder.captures[0].plans["backward"].gathers] == ["all_gather"]


def outputs_of(model: nn.Module, seed: int, **options: Any) -> dict[str, torch.Tensor | None]:
    """Output, input gradient and every gradient of one step on this rank's data."""
    model.zero_grad()
    x, words = inputs(seed)
    step = torch.compile(model, backend="fxshard", fullgraph=True, options={"codegen": "eager", **options})
    out = step(x, words)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    reset_dynamo()
    return {"output": out.detach(), "input": x.grad, **dict(named_grads(model))}


def differences(seeds: range) -> list[str]:
    """Where the fused form and the unfused one differ by more than rounding, on this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    said = []
    for seed in seeds:
        choose = random.Random(seed)
        model = build(random_spec(choose.choice), seed=seed)
        unfused = outputs_of(model, 100 * seed + rank, fuse=False)
        fused = outputs_of(model, 100 * seed + rank, prefetch=choose.randrange(4))
        for name, want in unfused.items():
            got = fused[name]
            if (want is None) != (got is None):
                said.append(f"seed {seed} {name}: {want is None=} {got is None=}")
            elif want is not None and got is not None and not torch.allclose(got, want, rtol=1e-6, atol=1e-6):
                said.append(f"seed {seed} {name}: off by {(got - want).abs().max()} of {want.abs().max()}")
    return said


@pytest.mark.parametrize("seeds", [SEEDS[:10], pytest.param(SEEDS[10:], marks=pytest.mark.slow)], ids=("some", "rest"))
def test_the_fused_graph_computes_what_the_unfused_one_does_on_two_ranks(ranks2: Any, seeds: range) -> None:
    assert ranks2.run(differences, seeds, deadline=400.0) == [[], []]


def test_the_fused_graph_computes_what_the_unfused_one_does_without_a_process_group() -> None:
    assert not dist.is_initialized()
    assert differences(SEEDS[:3]) == []


def test_random_models_vary() -> None:
    """The seeds above have shared and tied modules, frozen weights, both dtypes and more than one unit."""
    text = [repr(random_spec(random.Random(seed).choice)) for seed in SEEDS]
    for feature in ("'share'", "'tie'", "'weight'", "'all'", "float64", "policy=True", "reshard=False"):
        assert sum(feature in t for t in text) >= 3, feature
