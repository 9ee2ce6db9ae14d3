"""What people who know ``torch.distributed.fsdp.fully_shard`` expect: names, types, methods, signatures, errors."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.refused_methods import INSTEAD

METHODS = sorted({name for name in dir(FSDPModule) if not name.startswith("_")} - set(dir(nn.Module)))


class Net(nn.Module):
    """Keeps what its forward saw as its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.layer.weight)
        return self.layer(x)


def sharded() -> Any:
    return fxshard.fully_shard(Net())


def test_fully_shard_takes_what_that_of_torch_takes_in_the_same_order() -> None:
    theirs, ours = (list(inspect.signature(f).parameters.values()) for f in (fully_shard, fxshard.fully_shard))
    known = [p for p in theirs if p.name != "dp_mesh_dims"]  # torch 2.13 on; a mesh has a shard dim and replicates
    assert [(p.name, p.kind) for p in ours[: len(known)]] == [(p.name, p.kind) for p in known]


def test_the_module_is_changed_in_place_and_keeps_its_type_and_names() -> None:
    plain, model = Net(), Net()
    assert fxshard.fully_shard(model) is model
    assert isinstance(model, Net) and type(model).__name__ == "Net"
    assert [k for k, _ in model.named_parameters()] == [k for k, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())


def test_outside_forward_parameters_are_dtensors_and_inside_they_are_full_tensors() -> None:
    model = sharded()
    assert all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    (inside,) = model.seen
    assert type(inside) is Tensor and inside.shape == (3, 4) and inside.requires_grad
    assert isinstance(model.layer.weight, DTensor)
    assert all(isinstance(p.grad, DTensor) and p.grad.shape == p.shape for p in model.parameters())


def test_unshard_makes_parameters_full_tensors_until_reshard() -> None:
    model = sharded()
    handle = model.unshard(async_op=True)
    handle.wait()
    assert type(model.layer.weight) is Tensor
    model.reshard()
    assert isinstance(model.layer.weight, DTensor)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_there_with_the_same_arguments_or_says_what_to_do_instead(name: str) -> None:
    model = sharded()
    if name in INSTEAD:
        with pytest.raises(NotImplementedError, match=f"has no {name}: "):
            getattr(model, name)(True)
        return
    theirs, ours = (inspect.signature(getattr(cls, name)).parameters for cls in (FSDPModule, type(model)))
    assert list(ours)[: len(theirs)] == list(theirs)


def test_what_is_refused_is_refused_in_words_of_the_options_and_methods_that_there_are() -> None:
    assert 'options={"in_flight": n}' in INSTEAD["set_reduce_scatter_max_input_buffers"]
    options = {"in_flight": 2, "codegen": "eager"}
    model = torch.compile(nn.Linear(2, 2), backend="fxshard", options=options)
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert callable(sharded().set_gradient_divide_factor)


def test_flags_that_are_no_bools_are_refused() -> None:
    for method in ("set_requires_gradient_sync", "set_reshard_after_forward", "set_requires_all_reduce"):
        with pytest.raises(ValueError, match="bool"):
            getattr(sharded(), method)("yes")


def test_a_container_without_a_forward_is_refused_as_torch_does() -> None:
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.raises(ValueError, match="forward"):
            fxshard.fully_shard(container)
