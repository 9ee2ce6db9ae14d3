"""Names and shapes are the unsharded model's, and a checkpoint of one world loads in another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import GPT2, tokens
from torch.distributed.tensor import DTensor

import fxshard


def model_of(seed: int, shard: bool = True) -> GPT2:
    torch.manual_seed(seed)
    model = GPT2(width=12, blocks=2, heads=2)
    return fxshard.shard(model) if shard else model


def names_and_shapes(compiled: bool) -> list[tuple[str, tuple[int, ...]]]:
    model = model_of(0)
    if compiled:
        torch.compile(model, backend="fxshard", options={"codegen": "eager"})(tokens(2, 4)).sum().backward()
    assert all(isinstance(p, DTensor) and isinstance(p, torch.nn.Parameter) for p in model.parameters())
    assert list(model.state_dict()) == [n for n, _ in model.named_parameters()]
    return [(n, tuple(p.shape)) for n, p in model.named_parameters()]


@pytest.mark.parametrize("compiled", [False, True])
def test_names_and_shapes_are_those_of_the_unsharded_model(ranks2: Any, compiled: bool) -> None:
    plain = [(n, tuple(p.shape)) for n, p in model_of(0, shard=False).named_parameters()]
    assert ranks2.run(names_and_shapes, compiled) == [plain, plain]


def save(path: str) -> None:
    dcp.save(model_of(1).state_dict(), checkpoint_id=path)


def load(path: str) -> dict[str, torch.Tensor]:
    """Into a sharded model with other values; its full values, as the next forward sees them."""
    model = model_of(2)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)
    return {n: p.full_tensor().detach() for n, p in model.named_parameters()} | {"out": model(tokens(2, 4)).detach()}


def test_a_checkpoint_of_two_ranks_loads_at_four_and_at_one_and_unsharded(
    ranks2: Any, ranks4: Any, tmp_path: Any
) -> None:
    path = str(tmp_path / "checkpoint")
    ranks2.run(save, path)
    plain = model_of(1, shard=False)
    want = {n: p.detach() for n, p in plain.named_parameters()} | {"out": plain(tokens(2, 4)).detach()}
    unsharded = model_of(2, shard=False).state_dict()
    dcp.load(unsharded, checkpoint_id=path)
    for loaded in [*ranks4.run(load, path), load(path), unsharded]:
        for name, value in loaded.items():
            torch.testing.assert_close(value, want[name], rtol=1e-6, atol=1e-6)
    assert set(unsharded) | {"out"} == set(want)
