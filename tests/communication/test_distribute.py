"""A plan carried out: dense parameters sharded or replicated, experts sharded over groups."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from micro_steps import BATCH, Trained, answer, batch, collectives
from ranks import RankPool
from torch import Tensor, nn
from training import compiled, full

import fxshard
from fxshard.distributed import DistributionPlan, distribution_plan
from fxshard.unit import units_of


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 6)
        self.down = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Layer(nn.Module):
    """Each token goes to its best expert alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        for i, expert in enumerate(self.experts):
            mask = (chosen == i).unsqueeze(-1)
            x = x + torch.where(mask, weight.unsqueeze(-1) * expert(x), 0.0)
        return x


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(form: str, plan: DistributionPlan | None) -> Trained:
    torch.manual_seed(0)
    model: Any = Mixture()
    part = slice(None)
    if plan is not None:
        fxshard.distribute(model, plan)
        assert distribution_plan(model) is plan
        rank, world = dist.get_rank(), dist.get_world_size()
        part = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    step = compiled(model, form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    out = Trained()
    for number in range(3):
        x, y = batch(number)
        optimizer.zero_grad()
        with collectives() if number == 2 else nullcontext([]) as log:
            ((step(x[part]) - y[part]) ** 2).mean().backward()
        out.logs.append(log)
        out.grads.append({k: full(p.grad) for k, p in model.named_parameters()})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        out.params.append({k: full(p) for k, p in model.named_parameters()})
    return out


@pytest.fixture(scope="module")
def plain() -> Trained:
    return train("eager", None)


CASES = [
    ("experts and fsdp", DistributionPlan(4, 2, "fsdp"), {"reduce_scatter": 5, "all_reduce": 2}),
    ("experts and replicas", DistributionPlan(4, 2, "replicate"), {"reduce_scatter": 2, "all_reduce": 5}),
    ("replicas", DistributionPlan(4, 1, "replicate"), {"reduce_scatter": 0, "all_reduce": 3}),
]
BY_DEFAULT = {("fx", "experts and fsdp")}


@pytest.mark.parametrize(
    ("form", "plan", "wanted"),
    [
        pytest.param(
            form, *case, id=f"{form} {name}", marks=() if (form, name) in BY_DEFAULT else pytest.mark.slow
        )
        for form in ("eager", "fx")
        for name, *case in CASES
    ],
)
def test_a_plan_trains_to_the_numbers_of_one_process(
    ranks4: RankPool, plain: Trained, form: str, plan: DistributionPlan, wanted: dict[str, int]
) -> None:
    got = answer(ranks4.run(train, form, plan))
    plain.compare(got)
    counts = Counter(op for op, _ in got.logs[-1])
    assert {op: counts[op] for op in wanted} == wanted


def held() -> tuple[Any, ...]:
    model = Mixture()
    fxshard.distribute(model, DistributionPlan(4, 2, "fsdp"))
    expert, dense = model.layers[0].experts, model.layers[0].gate  # type: ignore[union-attr]
    units = {u.name: tuple(u.buckets[0].mesh.shape) for u in units_of(model) if u.buckets}
    rows = sum(p.numel() for p in expert.parameters()) / sum(p._local_tensor.numel() for p in expert.parameters())  # type: ignore[union-attr, operator]
    return units, round(rows), tuple(dense.weight.device_mesh.shape)  # type: ignore[union-attr]


def test_experts_of_a_layer_are_one_unit_over_groups_of_neighbours(ranks4: RankPool) -> None:
    for units, cut, dense in ranks4.run(held):
        experts = [name for name in units if "experts" in name]
        assert len(experts) == 2 and all(units[name] == (2, 2) for name in experts)
        assert cut == 2 and dense == (4,)


@pytest.mark.parametrize(
    ("plan", "options", "said"),
    [
        ("fsdp", {}, "distribute carries out a DistributionPlan, got 'fsdp'"),
        (DistributionPlan(2), {}, r"the plan is for world_size=2, but the mesh has shape \(1,\)"),
        (DistributionPlan(1), {"units": "layers"}, 'units should be "auto" or a list'),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: Any, options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fxshard.distribute(nn.Sequential(nn.Linear(2, 2)), plan, **options)


def no_experts() -> list[str]:
    said = []
    for options in ({}, {"experts": [nn.Linear(2, 2)]}):
        try:
            fxshard.distribute(nn.Linear(2, 2), DistributionPlan(2, 2), **options)
        except ValueError as e:
            said.append(str(e))
    return said


def test_experts_that_are_not_there_are_named(ranks2: RankPool) -> None:
    for none, other in ranks2.run(no_experts):
        assert "Linear has no module named 'experts'; name the modules that hold them" in none
        assert "experts[0], a Linear, is no module of Linear" in other


def test_a_model_is_distributed_once() -> None:
    model = fxshard.distribute(nn.Linear(2, 2), DistributionPlan(dense="fsdp"))
    with pytest.raises(RuntimeError, match="already records"):
        fxshard.distribute(model, DistributionPlan())
