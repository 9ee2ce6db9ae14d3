"""LayoutTensors that meet torch.compile: graphs break at them, values stay right."""

from __future__ import annotations

import pytest
import torch
from sharded_cases import cuts_of, mesh_of, shard, values
from torch import nn

from fxshard.layout_tensor import LayoutTensor


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(t) for t in shard(values(), cuts_of(mesh_of()))]


def test_a_compiled_function_of_sharded_parameters_gives_the_eager_value():
    @torch.compile(backend="eager")
    def penalty(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return x.sin() + (p * 2 + 1).norm() + p.full_tensor().sum()

    x = torch.ones(3)
    for p, full in zip(_params(), values(), strict=True):
        torch.testing.assert_close(penalty(x, p), x.sin() + (full * 2 + 1).norm() + full.sum())
        (p * 3).sum().backward()
        assert p.grad is not None


def test_a_compiled_optimizer_steps_like_a_plain_one():
    plain, sharded = [nn.Parameter(v) for v in values()], _params()
    for params, grads in ((plain, values(1)), (sharded, shard(values(1), [p.cut for p in sharded]))):
        for p, g in zip(params, grads, strict=True):
            p.grad = g
    torch.optim.AdamW(plain).step()
    torch.compile(torch.optim.AdamW(sharded).step, backend="eager")()
    for p, s in zip(plain, sharded, strict=True):
        torch.testing.assert_close(s.full_tensor(), p.data)


def test_a_whole_graph_is_refused():
    with pytest.raises(torch._dynamo.exc.Unsupported, match="LayoutTensor"):
        torch.compile(lambda p: p * 2, backend="eager", fullgraph=True)(_params()[0])


def test_a_module_is_moved_and_materialised_with_its_parameters_kept():
    module = nn.Linear(3, 7)
    cuts = cuts_of(mesh_of(), [(((7, 3), 0), ((7,), 0))])
    for name, tensor in zip(("weight", "bias"), shard([p.data for p in module.parameters()], cuts), strict=True):
        setattr(module, name, nn.Parameter(tensor))
    weight, value = module.weight, module.weight.full_tensor().detach()
    module.double()
    assert module.weight is weight and weight.dtype == weight.to_local().dtype == torch.float64
    assert torch.equal(weight.full_tensor(), value.double())
    module.to("meta")
    assert module.weight is weight and weight.is_meta and weight.to_local().is_meta
    module.to_empty(device="cpu")
    assert module.weight is weight and isinstance(weight, LayoutTensor) and weight.cut is cuts[0]
    assert weight.to_local().shape == (7, 3) and weight.requires_grad and weight.device.type == "cpu"
