"""Every bad input is an error that names the thing, both sides of the mismatch and what to do, on every rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import GPT2, tokens
from ranks import run_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fxshard
from fxshard.options import parse_options


def message_of(kind: type[Exception], fn: Any) -> str:
    with pytest.raises(kind) as caught:
        fn()
    return str(caught.value)


def mesh_of_three_dims() -> str:
    mesh = init_device_mesh("cpu", (1, 1, dist.get_world_size()), mesh_dim_names=("pp", "replicate", "shard"))
    return message_of(ValueError, lambda: fxshard.shard(nn.Linear(4, 4), mesh))


def test_a_mesh_of_three_dims_is_refused_on_every_rank(ranks2: Any) -> None:
    for said in ranks2.run(mesh_of_three_dims):
        assert "3 dims ('pp', 'replicate', 'shard')" in said and "pass a slice of the mesh" in said


def forward_on_meta(form: str) -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fxshard.shard(model)
    step = model if form == "eager" else torch.compile(model, backend="fxshard", options={"codegen": "eager"})
    return message_of(RuntimeError, lambda: step(torch.ones(2, 4)))


@pytest.mark.parametrize("form", ["eager", "compiled"])
def test_a_model_on_meta_is_refused_at_its_first_forward(ranks2: Any, form: str) -> None:
    for said in ranks2.run(forward_on_meta, form):
        assert "is on the meta device" in said and "to_empty" in said and "weight'" in said


class WithScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))


def shard_scalar() -> str:
    return message_of(ValueError, lambda: fxshard.shard(WithScalar()))


def test_a_parameter_of_no_dims_is_refused_by_name(ranks2: Any) -> None:
    for said in ranks2.run(shard_scalar):
        assert "'temperature'" in said and "0 dims" in said and "shape (1,)" in said


def shard_twice() -> str:
    model = fxshard.fully_shard(nn.Linear(4, 4))
    return message_of(ValueError, lambda: fxshard.fully_shard(model))


def test_a_module_sharded_twice_is_refused(ranks2: Any) -> None:
    for said in ranks2.run(shard_twice):
        assert "Linear is sharded already" in said and "once" in said


def shard_without_group() -> None:
    fxshard.shard(nn.Linear(4, 4))


def test_a_launch_without_a_process_group_is_refused_on_every_rank() -> None:
    for child in run_processes(shard_without_group, 2):
        assert child.exception == "RuntimeError"
        assert "WORLD_SIZE=2" in child.message and "init_process_group" in child.message


def bad_options(options: dict[str, Any]) -> str:
    model = fxshard.shard(nn.Linear(4, 4))
    step = torch.compile(model, backend="fxshard", options=options)
    return message_of(Exception, lambda: step(torch.ones(2, 4)))


def test_an_unknown_option_names_the_near_miss_on_every_rank(ranks2: Any) -> None:
    for said in ranks2.run(bad_options, {"prefetsch": 2}):
        assert "unknown option 'prefetsch'" in said and "did you mean 'prefetch'?" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefetch": "1"}, "option 'prefetch' takes an int, got '1' of type str"),
        ({"prefetch": True}, "option 'prefetch' takes an int, got True of type bool"),
        ({"prefetch": -1}, "at least 0, got -1"),
        ({"codegen": "triton"}, "option 'codegen' is one of inductor, eager; got 'triton'"),
        ({"fuse": 1}, "option 'fuse' takes a bool or \"all-reduces\", got 1 of type int"),
        ({"fuse": "all"}, "option 'fuse' is one of True, False, all-reduces; got 'all'"),
        ({"inductor": ["a"]}, "option 'inductor' takes a mapping, got ['a'] of type list"),
        ({"zzz": 1}, "unknown option 'zzz' of backend fxshard; Known options: codegen, prefetch"),
    ],
)
def test_option_values_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_options(options)


def test_an_option_of_the_wrong_kind_is_refused_on_every_rank(ranks2: Any) -> None:
    for said in ranks2.run(bad_options, {"codegen": 3}):
        assert "option 'codegen' takes a string, got 3 of type int" in said


class Writing(nn.Module):
    """Writes to a view of a parameter in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.codes[1:].add_(1)
        return x @ self.codes


@pytest.mark.parametrize("name, model", [("codes", Writing()), ("weight", nn.Embedding(4, 3, max_norm=0.1))])
def test_a_compiled_forward_that_writes_to_a_parameter_is_refused_by_name(name: str, model: nn.Module) -> None:
    step = torch.compile(fxshard.shard(model), backend="fxshard", options={"codegen": "eager"})
    with pytest.raises(Exception, match=f"writes in place to parameter '{name}'.*Keep such state in a buffer"):
        step(torch.ones(2, 4) if name == "codes" else torch.tensor([0, 1]))


def test_lists_of_modules_are_checked() -> None:
    with pytest.raises(ValueError, match="empty list"):
        fxshard.fully_shard([])
    with pytest.raises(ValueError, match="item 1 is a int"):
        fxshard.fully_shard([nn.Linear(2, 2), 3])
    with pytest.raises(ValueError, match="does not take a ModuleList"):
        fxshard.fully_shard(nn.ModuleList([nn.Linear(2, 2)]))


def test_arguments_that_mean_nothing_yet_are_refused() -> None:
    with pytest.raises(ValueError, match="=4 asks for more ranks than the 1 that shard the parameters"):
        fxshard.fully_shard(nn.Linear(2, 2), reshard_after_forward=4)
    with pytest.raises(ValueError, match=r"reshard_after_forward should be a bool, None, or an int .* got 'yes'"):
        fxshard.fully_shard(nn.Linear(2, 2), reshard_after_forward="yes")
    with pytest.raises(ValueError, match="units should be"):
        fxshard.shard(nn.Linear(2, 2), units="blocks")


def test_a_number_of_ranks_to_reshard_to_divides_every_shard_size(fake_world: Any) -> None:
    with fake_world(4):
        for ranks, reshards, size in ((1, False, None), (2, True, 2), (4, True, None)):
            layer: Any = fxshard.fully_shard(nn.Linear(2, 2), reshard_after_forward=ranks)
            assert (layer._fxshard_unit.reshard_after_forward, layer._fxshard_unit.reshard_size) == (reshards, size)
        for ranks in (3, 0, -2):
            with pytest.raises(ValueError, match=rf"divides the shard size .*; got {ranks}, and the mesh has 4"):
                fxshard.fully_shard(nn.Linear(2, 2), reshard_after_forward=ranks)
        with pytest.raises(ValueError, match="=8 asks for more ranks than the 4 that shard the parameters"):
            fxshard.fully_shard(nn.Linear(2, 2), reshard_after_forward=8)
    with fake_world(6):
        layer, experts = nn.Linear(2, 2), init_device_mesh("cpu", (2, 3))
        with pytest.raises(ValueError, match="got 2, and the mesh of parameter 'bias' has 3"):
            fxshard.fully_shard(
                layer,
                reshard_after_forward=2,
                shard_placement_fn=lambda p: (Shard(0), experts) if p is layer.bias else None,
            )


def test_a_cut_along_a_dim_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Shard\(2\) for parameter 'weight', which has 2 dims"):
        fxshard.fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: Shard(2))


class IntsAndComplex(nn.Module):
    """A quantised table that is carried, and complex weights that train."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(12).view(6, 2) % 3, requires_grad=False)
        self.filter = nn.Parameter(torch.randn(5, 2, dtype=torch.complex64))
        self.out = nn.Linear(2, 3)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        mixed = torch.view_as_complex(self.table[index].float().contiguous())
        return self.out(torch.view_as_real((mixed[:, None] * self.filter.sum(1)).sum(1)))


def train_ints_and_complex(form: str) -> list[Any]:
    torch.manual_seed(0)
    plain, model = IntsAndComplex(), IntsAndComplex()
    model.load_state_dict(plain.state_dict())
    fxshard.shard(model)
    step = model if form == "eager" else torch.compile(model, backend="fxshard", options={"codegen": "eager"})
    index = torch.tensor([0, 3, 5, 1])
    rank, world = dist.get_rank(), dist.get_world_size()
    n = 4 // world
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (plain, model)]
    for _ in range(2):
        plain(index).pow(2).mean().backward()
        step(index[rank * n : (rank + 1) * n]).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return [torch.view_as_real((a - b.full_tensor()).detach() + 0j).abs().max().item() for a, b in pairs]


@pytest.mark.parametrize("form", ["eager", "compiled"])
def test_integer_parameters_are_carried_and_complex_ones_train(ranks2: Any, form: str) -> None:
    for differences in ranks2.run(train_ints_and_complex, form):
        assert max(differences) < 1e-5


def test_the_model_that_others_use_is_fine() -> None:
    model = fxshard.shard(GPT2(width=8, blocks=2, heads=2))
    model(tokens(1, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
