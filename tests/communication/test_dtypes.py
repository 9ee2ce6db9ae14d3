"""Dtypes of parameters, gathers and reductions: one bucket and one collective a combination, and no more casts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from micro_steps import collectives, mesh_of, set_flags
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from training import compiled, full

import fxshard


class Mixed(nn.Module):
    """Parameters stored in three dtypes, and one that is to be gathered in another than it is stored in."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.b = nn.Parameter(torch.tensor([4.0, 5.0, 6.0]))
        self.sixteen = nn.Parameter(torch.tensor([0.5, 0.25, 2.0], dtype=torch.float16))
        self.brain = nn.Parameter(torch.tensor([1.5, 0.75, 3.0], dtype=torch.bfloat16))
        self.cast = nn.Parameter(torch.tensor([1.0 + 2**-12, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.a, self.b, self.sixteen.float(), self.brain.float(), self.cast.float())
        return x * torch.stack(parts).prod(0)


def one_step(form: str) -> tuple[dict[str, Any], Counter[str], list[tuple[torch.dtype, ...]]]:
    model: Any = Mixed()
    policies = {model.cast: MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    fxshard.fully_shard(model, param_mp_policies=policies)
    step = compiled(model, form)
    for _ in range(2):
        model.zero_grad()
        with collectives() as log:  # the second has no compilation in it
            step(torch.ones(3)).sum().backward()
    grads = {name: full(p.grad) for name, p in model.named_parameters()}
    buckets = model._fxshard_unit.buckets
    return grads, Counter(op for op, _ in log), [(b.dtypes.storage, b.dtypes.gather, b.dtypes.reduce) for b in buckets]


@pytest.mark.parametrize("form", ("eager", "fx"))
def test_each_combination_of_dtypes_has_its_collectives(ranks2: RankPool, form: str) -> None:
    plain = Mixed()
    cast = plain.cast.detach().bfloat16().float().requires_grad_()
    plain.cast = nn.Parameter(cast)
    plain(torch.ones(3)).sum().backward()
    for grads, counts, dtypes in ranks2.run(one_step, form):
        assert dtypes == [
            (torch.float32,) * 3,
            (torch.float16,) * 3,
            (torch.bfloat16,) * 3,
            (torch.float32, torch.bfloat16, torch.float32),
        ]
        assert counts["reduce_scatter"] == 4
        for name, p in plain.named_parameters():
            assert grads[name].dtype == p.dtype
            tolerance = 1e-5 if p.dtype == torch.float32 else 1e-2
            torch.testing.assert_close(grads[name].float(), p.grad.float(), rtol=tolerance, atol=0)  # type: ignore[union-attr]


def outputs(form: str) -> list[torch.dtype]:
    layer: Any = nn.Linear(2, 2)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float64)
    fxshard.fully_shard(layer, mp_policy=policy)
    out = compiled(layer, form)(torch.ones(3, 2))
    out.sum().backward()
    return [out.dtype, layer.weight.grad.dtype, layer.weight.dtype]


@pytest.mark.parametrize("form", ("eager", "fx"))
def test_forwards_output_and_gradients_have_the_dtypes_of_the_policy(ranks2: RankPool, form: str) -> None:
    assert ranks2.run(outputs, form) == [[torch.float64, torch.float32, torch.float32]] * 2


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((4,), 2.0))

    def forward(self) -> Tensor:
        return torch.stack((self.one, self.two * 10))


def swapped(form: str) -> tuple[Tensor, Tensor]:
    """Two parameters that exchange their places in one storage: what is gathered follows."""
    layer: Any = Two()
    fxshard.fully_shard(layer)
    run = compiled(layer, form)
    before = run().detach().clone()
    one, two = layer.one, layer.two
    one._local_tensor, two._local_tensor = two._local_tensor, one._local_tensor
    return before, run().detach()


@pytest.mark.parametrize("form", ("eager", "fx"))
def test_parameters_that_exchange_their_storage_are_noticed(form: str) -> None:
    before, after = swapped(form)
    assert before[:, 0].tolist() == [1.0, 20.0]
    assert after[:, 0].tolist() == [2.0, 10.0]


MAIN = MixedPrecisionPolicy(reduce_dtype=torch.float32)


def half() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).bfloat16()


def main_gradients(form: str, shape: Sequence[int], script: Sequence[str]) -> tuple[bool, dict[str, Any]]:
    """How the main gradients of a model in bf16 differ from fp32 sums of what ranks compute, over micro-batches."""
    model: Any = fxshard.shard(half(), mesh_of(shape), mp_policy=MAIN, main_grads=True)
    plain, step = half(), compiled(model, form)
    expected = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in plain.named_parameters()}
    for number, flag in enumerate(script):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * number + dist.get_rank())).bfloat16()
        set_flags(model, flag)
        step(x).float().square().sum().backward()
        plain.zero_grad()
        plain(x).float().square().sum().backward()
        for name, p in plain.named_parameters():
            grad = p.grad.float()  # type: ignore[union-attr]
            dist.all_reduce(grad)
            expected[name] += grad / dist.get_world_size()
    without = all(p.grad is None for p in model.parameters())
    got = {name: p.main_grad for name, p in model.named_parameters()}
    assert all(isinstance(g, fxshard.LayoutTensor) and g.dtype == torch.float32 for g in got.values())
    off = {k: (full(got[k]) - want).abs().max() / want.abs().max() for k, want in expected.items()}  # type: ignore[operator]
    return without, {k: v.item() for k, v in off.items()}


@pytest.mark.parametrize(
    "script", [pytest.param(["sync", "sync"], marks=pytest.mark.slow), ["wait", "park", "sync"]], ids="-".join
)
@pytest.mark.parametrize(
    ("form", "shape"), [("eager", (4,)), ("eager", (2, 2)), ("fx", (2, 2)), ("fx", (4, 1))], ids=str
)
def test_main_gradients_stay_in_the_reduce_dtype(
    ranks4: RankPool, form: str, shape: Sequence[int], script: Sequence[str]
) -> None:
    for without_grad, differences in ranks4.run(main_gradients, form, shape, script):
        assert without_grad
        assert max(differences.values()) < 1e-6, differences
