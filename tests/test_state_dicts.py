"""Names and shapes are the unsharded model's, and a checkpoint of one world loads in another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import GPT2, tokens
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

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


def through_torch(replicated: bool, full: bool, from_rank_0: bool) -> list[bool]:
    """Whether a model and its optimizer, read and loaded by torch's own functions, are those that were read."""
    mesh = init_device_mesh("cpu", (2, 2) if replicated else (4,))
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=from_rank_0, cpu_offload=full)

    def trained(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = fxshard.shard(GPT2(width=12, blocks=2, heads=2), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(tokens(2, 4, seed=seed)).square().mean().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), (other, others) = trained(1), trained(2)
    read = StateDictOptions(full_state_dict=full, cpu_offload=full)
    values, states = get_model_state_dict(model, options=read), get_optimizer_state_dict(model, optimizer, options=read)
    if full:
        assert dist.get_rank() == 0 or not values, "offloaded full values are on rank 0 alone"
        if not from_rank_0:
            everywhere = StateDictOptions(full_state_dict=True)
            values = get_model_state_dict(model, options=everywhere)
            states = get_optimizer_state_dict(model, optimizer, options=everywhere)
    set_model_state_dict(other, values, options=options)
    set_optimizer_state_dict(other, others, states, options=options)
    same = []
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        same.append(torch.equal(p.full_tensor(), q.full_tensor()))
        for key, value in optimizer.state[p].items():
            loaded = others.state[q][key]
            whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in (value, loaded)]
            same.append(torch.equal(*whole))
    return same


@pytest.mark.parametrize("replicated", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("full", "from_rank_0"), [(False, False), (True, False), (True, True)])
def test_torchs_own_functions_read_and_load_models_and_optimizers(
    ranks4: Any, replicated: bool, full: bool, from_rank_0: bool
) -> None:
    for same in ranks4.run(through_torch, replicated, full, from_rank_0):
        assert all(same) and len(same) > 30


def wrong_parts() -> None:
    model = fxshard.fully_shard(nn.Linear(3, 5, bias=False))
    mesh = model.weight.device_mesh
    rows = 4 if dist.get_rank() == 0 else 1  # of 5, of which torch.chunk would give 3 and 2
    value = DTensor.from_local(torch.ones(rows, 3), mesh, [Shard(0)], shape=torch.Size((5, 3)), stride=(3, 1))
    with torch.no_grad():
        model.weight.copy_(value)


def test_a_dtensor_that_is_cut_otherwise_than_it_says_is_refused_on_every_rank(ranks2: Any) -> None:
    with pytest.raises(AssertionError, match=r"rank \[0, 1\] of 2 ranks failed(.|\n)*not those of torch\.chunk"):
        ranks2.run(wrong_parts)
