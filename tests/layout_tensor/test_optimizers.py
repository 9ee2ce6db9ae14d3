"""Every optimizer of torch.optim on sharded parameters against the same optimizer on whole ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sharded_cases import cuts_of, mesh_of, shard, values
from torch import nn

from fxshard.layout_tensor import LayoutTensor

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.01}),
    "adam-amsgrad": (torch.optim.Adam, {"amsgrad": True, "lr": 1e-2}),
    "adam-tensor-lr": (torch.optim.Adam, {"lr": torch.tensor(1e-2)}),
    "adamw": (torch.optim.AdamW, {"maximize": True}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"weight_decay": 0.01}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
}
FUSED = ("adam-tensor-lr", "sgd", "sgd-momentum", "adam", "adam-amsgrad", "adamw", "adagrad")
WAYS = [
    (name, way)
    for name in OPTIMIZERS
    for way in ("single", "foreach", "fused")
    if (way != "fused" or name in FUSED) and (way, name) != ("foreach", "adam-tensor-lr")
]


def _flags(way: str) -> dict[str, bool]:
    return {"foreach": way == "foreach"} | ({"fused": True} if way == "fused" else {})


def _train(params: list[nn.Parameter], grads: list[list[Any]], name: str, way: str) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    optimizer = kind(params, **copy.deepcopy(options), **_flags(way))
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _steps_like_the_plain_optimizer(sizes: tuple[int, ...], ways: list[tuple[str, str]]) -> None:
    cuts = cuts_of(mesh_of(*sizes))
    for name, way in ways:
        plain = [nn.Parameter(v.clone()) for v in values()]
        grads = [values(seed) for seed in range(1, 8)]
        plain_optimizer = _train(plain, grads, name, way)
        sharded = [nn.Parameter(t) for t in shard(values(), cuts)]
        optimizer = _train(sharded, [shard(g, cuts) for g in grads], name, way)
        # Fused kernels use other instructions for the elements after the last whole vector: the last bit may differ.
        exact = {} if way == "fused" else {"rtol": 0, "atol": 0}
        for i, (p, s) in enumerate(zip(plain, sharded, strict=True)):
            _same(s, p.data, f"{name} {way} {i}", exact)
            for key, value in plain_optimizer.state[p].items():
                _same(optimizer.state[s][key], value, f"{name} {way} {i} {key}", exact)


def _same(ours: Any, theirs: Any, name: str, tolerance: dict[str, float]) -> None:
    whole = ours.full_tensor() if isinstance(ours, LayoutTensor) else ours
    torch.testing.assert_close(whole, theirs, **tolerance, msg=lambda m: f"{name}: {m}")


def test_all_optimizers_step_like_the_unsharded_ones(ranks2):
    ranks2.run(_steps_like_the_plain_optimizer, (2,), WAYS)


@pytest.mark.slow
def test_all_optimizers_step_like_the_unsharded_ones_on_a_2d_mesh(ranks4):
    ranks4.run(_steps_like_the_plain_optimizer, (2, 2), WAYS)


def test_all_optimizers_step_without_a_process_group():
    _steps_like_the_plain_optimizer((), WAYS)
