"""A model built on meta and sharded is initialised under its shards to the unsharded model's values, and moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import GPT2, tokens
from torch import nn

import fxshard


def reset(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}


def initialised_under_shards() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = GPT2(width=12, blocks=2, heads=2)
    fxshard.shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    reset(model)
    out = model(tokens(1, 4))  # reads the flat shards, not the tensors that users hold
    return full(model) | {"out": out.detach()}


def test_initialisation_under_shards_equals_the_unsharded_one(ranks3: Any) -> None:
    plain = GPT2(width=12, blocks=2, heads=2)
    torch.manual_seed(5)
    reset(plain)
    want = full(plain) | {"out": plain(tokens(1, 4)).detach()}
    for got in ranks3.run(initialised_under_shards):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


def moved(form: str) -> list[torch.dtype]:
    model = fxshard.shard(GPT2(width=12, blocks=2, heads=2))
    step = model if form == "eager" else torch.compile(model, backend="fxshard", options={"codegen": "eager"})
    before = step(tokens(1, 4)).detach()
    model.to(dtype=torch.float64)
    out = step(tokens(1, 4))
    out.sum().backward()
    torch.testing.assert_close(out.detach().float(), before, rtol=1e-4, atol=1e-5)
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.parameters())
    return [p.dtype for p in model.parameters()]


@pytest.mark.parametrize("form", ["eager", "compiled"])
def test_a_sharded_model_moves_to_another_dtype(ranks3: Any, form: str) -> None:
    for dtypes in ranks3.run(moved, form):
        assert set(dtypes) == {torch.float64}


def loaded(strict: bool, assign: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    source = GPT2(width=12, blocks=2, heads=2).state_dict()
    sharded = fxshard.shard(GPT2(width=12, blocks=2, heads=2))
    if assign:  # values of another sharded model become this one's parameters
        other = fxshard.shard(GPT2(width=12, blocks=2, heads=2))
        other.load_state_dict(source)
        source = other.state_dict()
    if not strict:
        source.pop("head.weight")
        source["unknown"] = torch.zeros(1)
    missing = sharded.load_state_dict(source, strict=strict, assign=assign)
    assert list(missing.missing_keys) == ([] if strict else ["head.weight"])
    out = sharded(tokens(1, 4)).detach()
    return full(sharded) | ({"out": out} if strict else {})


@pytest.mark.parametrize(("strict", "assign"), [(True, False), (False, False), (True, True)])
def test_full_and_sharded_state_dicts_load(ranks3: Any, strict: bool, assign: bool) -> None:
    torch.manual_seed(1)
    plain = GPT2(width=12, blocks=2, heads=2)
    want = full(plain) | {"out": plain(tokens(1, 4)).detach()}
    if not strict:
        del want["head.weight"], want["out"]
    for got in ranks3.run(loaded, strict, assign):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


def test_full_values_cannot_be_assigned_and_the_parameter_is_named(ranks3: Any) -> None:
    for said in ranks3.run(assign_full):
        assert ".weight'" in said or ".bias'" in said
        assert "replaced by" in said or "assign" in said


def assign_full() -> str:
    model = fxshard.shard(GPT2(width=12, blocks=2, heads=2))
    try:
        model.load_state_dict(GPT2(width=12, blocks=2, heads=2).state_dict(), assign=True)
        model(tokens(1, 4))
    except RuntimeError as e:
        return str(e)
    return "accepted"
