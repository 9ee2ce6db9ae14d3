"""However parameters are cut, in rows, blocks, whole tensors or along another dim, training gives the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fxshard
from fxshard.placement import BlockAtomic, RowAtomic, TensorAtomic


class Net(nn.Module):
    """Row sizes without a common divisor, a tensor with fewer rows than ranks, and a matrix of a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.wide = nn.Linear(6, 14)
        self.row = nn.Parameter(torch.randn(1, 14))
        self.out = nn.Linear(14, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.out(self.wide(x) * self.row)


def last_dim(p: nn.Parameter) -> Shard:
    return Shard(p.ndim - 1)


def blocks_of_two(p: nn.Parameter) -> Shard | None:
    return BlockAtomic(2) if p.shape[0] % 2 == 0 else None


def whole(p: nn.Parameter) -> Shard:
    return TensorAtomic()


def all_on_rank_one(p: nn.Parameter) -> Shard:
    return TensorAtomic(1)


def mixed(p: nn.Parameter) -> Shard:
    return {1: RowAtomic(), 2: Shard(1)}[p.ndim] if p.shape[0] != 14 else TensorAtomic()


def compare(placement_fn: Any, form: str, mesh_shape: Any = None) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    shape = mesh_shape or (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    fxshard.shard(model, mesh, shard_placement_fn=placement_fn)
    step = model if form == "uncompiled" else torch.compile(model, backend="fxshard", options={"codegen": form})
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, model)]
    worst = 0.0
    for seed in range(2):
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(seed))
        n = 12 // world
        plain(x).pow(2).mean().backward()
        step(x[rank * n : (rank + 1) * n]).pow(2).mean().backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            worst = max(worst, float((p.grad - q.grad.full_tensor()).abs().max() / p.grad.abs().max()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert p.shape == q.shape, name
        worst = max(worst, float(((p - q.full_tensor()).abs().max() / p.abs().max()).detach()))
    return worst


PLACEMENTS = [None, last_dim, blocks_of_two, whole, all_on_rank_one, mixed]


@pytest.mark.parametrize("form", ["uncompiled", "eager"])
@pytest.mark.parametrize("fn", PLACEMENTS, ids=lambda f: getattr(f, "__name__", "rows"))
def test_three_ranks_equal_one_process(ranks3: Any, fn: Any, form: str) -> None:
    assert max(ranks3.run(compare, fn, form)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("fn", PLACEMENTS, ids=lambda f: getattr(f, "__name__", "rows"))
def test_hybrid_sharding_equals_one_process(ranks4: Any, fn: Any) -> None:
    assert max(ranks4.run(compare, fn, "eager", (2, 2))) < 1e-5


def owned_rows() -> list[int]:
    model = fxshard.fully_shard(nn.Linear(5, 7), shard_placement_fn=lambda p: TensorAtomic(1 if p.ndim == 2 else 0))
    return [p.to_local().shape[0] for p in model.parameters()]


def test_a_whole_tensor_lies_on_its_owner_alone(ranks3: Any) -> None:
    assert ranks3.run(owned_rows) == [[0, 7], [7, 0], [0, 0]]


def refused(placement: Any) -> str:
    try:
        fxshard.fully_shard(nn.Linear(5, 7), shard_placement_fn=lambda p: placement)
    except (ValueError, TypeError) as e:
        return f"{type(e).__name__}: {e}"
    return "accepted"


def test_impossible_placements_are_refused_by_name() -> None:
    gave = "shard_placement_fn gave {} for parameter 'weight'"
    assert refused(BlockAtomic(2)).startswith("ValueError: " + gave.format("BlockAtomic(2)"))
    assert refused("rows").startswith("TypeError: " + gave.format("'rows'"))
    said = "ValueError: " + gave.format("TensorAtomic(3)") + ", but the mesh shards over 1 ranks"
    assert refused(TensorAtomic(3)).startswith(said)
