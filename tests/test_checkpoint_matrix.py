"""A run saved on 2 ranks goes on, as if never interrupted, on 4 ranks, on 3, in one process, and unsharded."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fxshard
from fxshard import checkpoint
from fxshard.placement import BlockAtomic, TensorAtomic


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.SiLU(), nn.Linear(10, 6)) for _ in range(2))
        self.head = nn.Linear(6, 10, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def blocks_of_two(p: nn.Parameter) -> Shard:
    return BlockAtomic(2)


def whole(p: nn.Parameter) -> Shard:
    return TensorAtomic()


PLACEMENTS = {"rows": None, "blocks": blocks_of_two, "tensors": whole, "dim1": lambda p: Shard(p.ndim - 1)}


def build(placement: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Net()
    if placement == "one unit":
        fxshard.fully_shard(model)
    elif placement != "unsharded":
        fxshard.shard(model, shard_placement_fn=PLACEMENTS[placement])
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1]}]
    groups.append({"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0})
    return model, torch.optim.AdamW(groups, lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in range(first, last):
        tokens = torch.randint(0, 10, (12, 5), generator=torch.Generator().manual_seed(step))
        mine = tokens[rank * 12 // world : (rank + 1) * 12 // world]
        optimizer.zero_grad()
        F.cross_entropy(model(mine).flatten(0, 1), mine.flatten()).backward()
        optimizer.step()


def full(model: nn.Module) -> dict[str, Tensor]:
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}


def start_and_save(path: str) -> None:
    model, optimizer = build("rows", 0)
    train(model, optimizer, 0, 3)
    checkpoint.save(model, optimizer, path, extra={"step": 3})


def load_and_go_on(path: str, placement: str) -> dict[str, Tensor]:
    model, optimizer = build(placement, 1)
    extra = checkpoint.load(model, optimizer, path)
    train(model, optimizer, extra["step"], 6)
    return full(model)


@functools.cache
def uninterrupted() -> dict[str, Tensor]:
    model, optimizer = build("unsharded", 0)
    train(model, optimizer, 0, 6)
    return full(model)


def check(results: list[dict[str, Tensor]]) -> None:
    for result in results:
        assert result.keys() == uninterrupted().keys()
        for name, want in uninterrupted().items():
            assert (result[name] - want).abs().max() <= 1e-5 * want.abs().max(), name


@pytest.fixture(scope="module")
def saved(ranks2: Any, tmp_path_factory: Any) -> str:
    path = str(tmp_path_factory.mktemp("run") / "checkpoint")
    ranks2.run(start_and_save, path)
    return path


@pytest.mark.parametrize("placement", ["blocks", pytest.param("rows", marks=pytest.mark.slow)])
def test_goes_on_at_four_ranks(saved: str, ranks4: Any, placement: str) -> None:
    check(ranks4.run(load_and_go_on, saved, placement))


@pytest.mark.parametrize("placement", [pytest.param("tensors", marks=pytest.mark.slow), "dim1"])
def test_goes_on_at_three_ranks(saved: str, ranks3: Any, placement: str) -> None:
    check(ranks3.run(load_and_go_on, saved, placement))


@pytest.mark.parametrize("placement", ["unsharded", "rows", "one unit"])
def test_goes_on_in_one_process(saved: str, placement: str) -> None:
    check([load_and_go_on(saved, placement)])
