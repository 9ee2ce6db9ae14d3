"""Meshes of two dims, dims of one rank, replicated parameters, and parameters of one model on different meshes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from micro_steps import Net, Trained, answer, mesh_of, train
from ranks import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from training import full

import fxshard
from fxshard.mesh import split_mesh

Plain = Callable[[Sequence[Sequence[str]]], Trained]
FORMS = ("eager", "fx")
STEPS = [["sync"]] * 2


def counts(trained: Trained) -> Counter[str]:
    """Collectives of the last step, without the norms and full values that the test itself asks for."""
    return Counter(op for op, _ in trained.logs[-1])


def _train(form: str, shape: Sequence[int], script: Any) -> Trained:
    return train(form, shape, script, log=True)


@pytest.mark.slow  # by default test_parity compares each with one process
@pytest.mark.parametrize("form", FORMS)
def test_hybrid_sharding_equals_sharding_over_all_and_one_process(ranks4: RankPool, plain: Plain, form: str) -> None:
    hybrid = answer(ranks4.run(_train, form, (2, 2), STEPS))
    sharded = answer(ranks4.run(_train, form, (4,), STEPS))
    plain(STEPS).compare(hybrid)
    plain(STEPS).compare(sharded)
    sharded.compare(hybrid)
    assert counts(hybrid) == counts(sharded) + Counter(all_reduce=3)


@pytest.mark.parametrize("form", FORMS)
def test_a_shard_dim_of_one_rank_is_data_parallel(ranks2: RankPool, plain: Plain, form: str) -> None:
    got = answer(ranks2.run(_train, form, (2, 1), STEPS))
    plain(STEPS).compare(got)
    assert counts(got) == {"all_reduce": 3}


@pytest.mark.parametrize("form", FORMS)
def test_a_replicate_dim_of_one_rank_is_plain_sharding(ranks2: RankPool, plain: Plain, form: str) -> None:
    got = answer(ranks2.run(_train, form, (1, 2), STEPS))
    plain(STEPS).compare(got)
    assert counts(got)["all_reduce"] == 0


def train_with_replicated_norms(form: str, shape: Sequence[int]) -> Trained:
    chosen: set[nn.Parameter] = set()

    def make() -> nn.Module:
        model = Net()
        chosen.update(p for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters())
        return model

    return train(form, shape, STEPS, make=make, shard={"replicate_params": chosen}, log=True)


@pytest.mark.parametrize("shape", [pytest.param((4,), marks=pytest.mark.slow), (2, 2)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_replicated_parameters_are_all_reduced_over_all_ranks(
    ranks4: RankPool, plain: Plain, form: str, shape: Sequence[int]
) -> None:
    got = answer(ranks4.run(train_with_replicated_norms, form, shape))
    plain(STEPS).compare(got)
    # Of two blocks and the head, the blocks have replicated norms; with replicas every sharded bucket has another.
    assert counts(got)["reduce_scatter"] == 3
    assert counts(got)["all_reduce"] == 2 + (3 if len(shape) == 2 else 0)


def what_replicated_parameters_are() -> tuple[Any, ...]:
    layer = nn.LayerNorm(3)
    mesh = mesh_of((2,))
    fxshard.fully_shard(layer, mesh=mesh, replicate_params={layer.bias})
    weight, bias = layer.weight, layer.bias
    layer(torch.ones(2, 3) * dist.get_rank()).sum().backward()
    norm = torch.nn.utils.get_total_norm([full(p.grad) for p in (weight, bias)])  # type: ignore[misc]
    same = torch.nn.utils.clip_grad_norm_([weight, bias], 100.0)
    rows = weight._local_tensor.shape[0], bias._local_tensor.shape[0]
    return *rows, split_mesh(mesh, 1) is bias.device_mesh, torch.allclose(norm, same)


def test_every_rank_holds_a_replicated_parameter_whole(ranks2: RankPool) -> None:
    first, second = ranks2.run(what_replicated_parameters_are)
    assert first == (2, 3, True, True) and second == (1, 3, True, True)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 5, 6) / 3)
        self.down = nn.Parameter(torch.randn(4, 6, 5) / 3)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(torch.einsum("td,edh->eth", x, self.up))
        return torch.einsum("eth,ehd,te->td", hidden, self.down, weights)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(5, 4)
        self.experts = Experts()
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.experts(x, self.router(x).softmax(-1)))


def mixture_plain() -> Trained:
    return train("plain", (), STEPS, make=Mixture)


def mixture(form: str, how: str) -> Trained:
    """Experts over groups of two ranks, the rest over all four."""
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "expert"))
    if how == "by unit":
        return train(form, (4,), STEPS, make=lambda: _experts_first(group), log=True)

    def place(param: nn.Parameter) -> Any:
        return (Shard(0), group) if param.ndim == 3 else None

    return train(form, (4,), STEPS, make=Mixture, shard={"shard_placement_fn": place}, log=True)


def _experts_first(group: Any) -> nn.Module:
    model = Mixture()
    fxshard.fully_shard(model.experts, mesh=group)
    return model


@pytest.mark.parametrize("how", ("by unit", pytest.param("by parameter", marks=pytest.mark.slow)))
@pytest.mark.parametrize("form", FORMS)
def test_experts_live_on_a_group_of_their_own(ranks4: RankPool, form: str, how: str) -> None:
    got = answer(ranks4.run(mixture, form, how))
    mixture_plain().compare(got)
    assert counts(got)["all_reduce"] == 1  # of the experts, over their replicas


def refused() -> list[str]:
    said = []
    for options in (
        {"replicate_params": {"weight"}},
        {"param_mp_policies": {"weight": None}},
        {"offload_policy": "cpu"},
        {"shard_placement_fn": lambda p: (Shard(0), "mesh")},
    ):
        try:
            fxshard.fully_shard(nn.Linear(2, 2), **options)  # type: ignore[arg-type]
        except TypeError as e:
            said.append(str(e))
    return said


def test_what_is_no_parameter_or_policy_is_refused() -> None:
    params, policies, offload, placement = refused()
    assert params == "replicate_params holds parameters of the module, got a str"
    assert policies == "param_mp_policies holds parameters of the module, got a str"
    assert "offload_policy is an OffloadPolicy or CPUOffloadPolicy, got 'cpu'" in offload
    assert "for parameter 'weight'; give Shard(k)" in placement
