"""What ops on sharded tensors give: right values, plain results of reductions, or an error; never a wrong value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sharded_cases import CASES, cuts_of, mesh_of, shard, values
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fxshard.layout_tensor import LayoutTensor

INF, NAN = math.inf, math.nan


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, LayoutTensor) else value


def _same(ours: Any, theirs: Any, name: str, **tolerance: float) -> None:
    assert type(ours) is type(theirs) if not isinstance(theirs, Tensor) else isinstance(ours, Tensor), name
    if isinstance(theirs, Tensor):
        torch.testing.assert_close(_whole(ours), theirs, equal_nan=True, msg=lambda m: f"{name}: {m}", **tolerance)
    else:
        assert ours == theirs or (ours != ours and theirs != theirs), name


# ---- element-wise ---------------------------------------------------------------------------------------------------

ELEMENTWISE = {
    "scalar": lambda x, y: 2 * x - 1,
    "two": lambda x, y: x + y * x,
    "zero dim": lambda x, y: x / torch.tensor(3.0),
    "zero dim first": lambda x, y: torch.tensor(3.0, dtype=torch.float64) - x,
    "one element": lambda x, y: x * torch.tensor([2.0]),
    "expanded scalar": lambda x, y: x + torch.tensor(2.0).expand(x.shape),
    "comparison": lambda x, y: (x > y) & ~(x == 0) | (y <= 0.5),
    "where": lambda x, y: torch.where(x > 0, x, 0.5),
    "clamp": lambda x, y: x.clamp(-y.abs(), y.abs() + 1),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.3),
    "lerp": lambda x, y: x.lerp(y, torch.tensor(0.3)),
    "pow": lambda x, y: 2**x + x.abs() ** y,
    "unary": lambda x, y: x.abs().sqrt().log1p().neg().sigmoid().tanh(),
    "isnan": lambda x, y: x.isnan() | x.isinf() | ~x.isfinite(),
    "integer": lambda x, y: (x * 10).to(torch.int32) // 3 % 2 ^ 1,
    "half": lambda x, y: x.bfloat16() + 1,
    "double": lambda x, y: x.double().exp(),
    "copies": lambda x, y: x.clone().contiguous().detach() + torch.zeros_like(y) + torch.full_like(x, 2),
    "new": lambda x, y: x.new_zeros(x.shape) + x.new_full(x.shape, 3) + x.new_ones(()),
    "out": lambda x, y: torch.maximum(x, y, out=torch.empty_like(x)),
    "in place": lambda x, y: x.clone().mul_(2).add_(y, alpha=3).fill_(y.new_ones(())).sub_(y).relu_(),
    "copy_": lambda x, y: torch.empty_like(x).copy_(y).copy_(x.double()),
    "copy_ scalar": lambda x, y: torch.empty_like(x).copy_(torch.tensor(4)),
    "mask": lambda x, y: x.clone().masked_fill_(x > 0, -1).masked_fill(y > 0, torch.tensor(7.0)),
    "mask put": lambda x, y: x.clone().index_put_((x > 0,), torch.tensor(9.0)),
    "foreach": lambda x, y: torch._foreach_add(torch._foreach_mul([x, y], [2.0, 3.0]), [y, x], alpha=2)[1],
    "foreach tensor": lambda x, y: torch._foreach_mul([x], torch.tensor(3.0))[0],
    "foreach copy": lambda x, y: (t := [torch.empty_like(x)], torch._foreach_copy_(t, [y]))[0][0],
}


def _elementwise_ops_agree() -> None:
    fulls = [torch.where(v.abs() < 0.1, NAN, v) for v in values(1)], values(2)
    cuts = cuts_of(mesh_of())
    for x, y, sx, sy in zip(*fulls, *(shard(v, cuts) for v in fulls), strict=True):
        for name, op in ELEMENTWISE.items():
            ours = op(sx, sy)
            _same(ours, op(x, y), name, rtol=0, atol=1e-6)
            assert type(ours) is LayoutTensor and ours.cut is sx.cut, name


def test_element_wise_ops_give_sharded_tensors_of_the_same_cut(ranks2):
    ranks2.run(_elementwise_ops_agree)


def test_plain_and_sharded_tensors_may_mix_along_a_list():
    sharded, plain = shard(values(), cuts_of(mesh_of()))[0], torch.ones(3)
    torch._foreach_mul_([sharded, plain], 2)
    ours, theirs = torch._foreach_add([sharded, plain], [sharded, plain])
    _same(ours, 4 * values()[0], "sharded")
    _same(theirs, torch.full((3,), 4.0), "plain")
    norms = torch._foreach_norm([plain, sharded])
    _same(norms[0], plain.norm(), "plain norm")


# ---- reductions -----------------------------------------------------------------------------------------------------

REDUCTIONS = {
    "sum": lambda x: x.sum(),
    "sum dtype": lambda x: x.sum(dtype=torch.float64),
    "sum all dims": lambda x: x.sum(dim=tuple(range(x.dim())), keepdim=True),
    "mean": lambda x: x.mean(),
    "prod": lambda x: (1 + 0.01 * x).prod(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(keepdim=True),
    "any": lambda x: (x > 2).any(),
    "all": lambda x: (x > -2).all(),
    "isnan any": lambda x: x.isnan().any(),
    "count": lambda x: (x > 0).count_nonzero(),
    "bool sum": lambda x: (x > 0).sum(),
    "item": lambda x: x.abs().max().item(),
    "equal": lambda x: torch.equal(x, x) and not torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1e-9) and not torch.allclose(x, x + 1),
    "norm": lambda x: x.norm(),
    "torch.norm": lambda x: torch.norm(x, 3),
    "vector norm": lambda x: torch.linalg.vector_norm(x, 1, dtype=torch.float64),
    "foreach norm": lambda x: torch._foreach_norm([x, x * 2], 1.5)[1],
    **{f"norm {p}": (lambda x, p=p: torch.linalg.vector_norm(x, p)) for p in (0, 0.5, 1, 2, INF, -INF, -1)},
}
POISONS = {
    "finite": lambda v: v,
    "nan": lambda v: v.where(v != v.max(), NAN),
    "inf": lambda v: v.where(v != v.min(), INF),
}


def _reductions_agree(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    cuts = cuts_of(mesh_of(*sizes))
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    for poison, change in POISONS.items():
        fulls = [change(v) for v in values(3, dtype=dtype)]
        for x, s in zip(fulls, shard(fulls, cuts), strict=True):
            for name, op in REDUCTIONS.items():
                ours = op(s)
                assert not isinstance(ours, LayoutTensor), name
                _same(ours, op(x), f"{name} of {poison} {s}", **tolerance)
            if x.numel() == 1:
                _same(s.item(), x.item(), "item")


@pytest.mark.parametrize("sizes", [(2,), (2, 1)])
def test_reductions_give_plain_tensors_of_the_whole_value(ranks2, sizes):
    ranks2.run(_reductions_agree, sizes, torch.float32)


def test_reductions_of_bfloat16_accumulate_in_float32(ranks2):
    ranks2.run(_reductions_agree, (2,), torch.bfloat16)


def test_reductions_work_without_a_process_group():
    _reductions_agree((), torch.float32)


def _items_of_single_elements() -> list[float]:
    tensor = shard([torch.tensor([[2.5]]), torch.tensor([4.0])], cuts_of(mesh_of(), [[((1, 1), 0), ((1,), 0)]]))
    return [t.item() for t in tensor]


def test_every_rank_reads_the_item_of_a_tensor_that_one_rank_owns(ranks2):
    assert ranks2.run(_items_of_single_elements) == [[2.5, 4.0]] * 2


def _collectives_of_norms() -> int:
    tensors = shard(values(), cuts_of(mesh_of()))
    with torch.profiler.profile() as profile:
        torch._foreach_norm(tensors, 2)
    return sum(event.count for event in profile.key_averages() if event.key.startswith("_c10d_functional::all_"))


def test_a_list_of_norms_is_one_collective(ranks2):
    assert ranks2.run(_collectives_of_norms) == [1, 1]


def test_reductions_of_no_elements_are_those_of_plain_tensors():
    sharded = shard([torch.empty(0, 4)], cuts_of(mesh_of(), [[((0, 4), 0)]]))[0]
    assert sharded.sum() == 0 and sharded.norm() == 0 and sharded.prod() == 1 and not sharded.any() and sharded.all()
    with pytest.raises(IndexError, match="no elements"):
        sharded.amax()
    for order in (-INF, -1):
        with pytest.raises(RuntimeError):
            torch.linalg.vector_norm(torch.empty(0), order)
        with pytest.raises(RuntimeError):
            torch.linalg.vector_norm(sharded, order)


# ---- refusals -------------------------------------------------------------------------------------------------------

REFUSED = {
    "mm": lambda x: x @ x,
    "linear": lambda x: nn.functional.linear(torch.ones(1, 3), x),
    "transpose": lambda x: x.t(),
    "movedim": lambda x: x.movedim(0, 1),
    "view": lambda x: x.view(-1),
    "flatten": lambda x: x.flatten(),
    "index": lambda x: x[0],
    "mask": lambda x: x[x > 0],
    "index put": lambda x: x.index_put_((torch.tensor([0]),), torch.ones(())),
    "setitem": lambda x: x.__setitem__(0, 1.0),
    "narrow": lambda x: x.narrow(0, 0, 1),
    "iterate": lambda x: list(x),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "split": lambda x: x.chunk(2),
    "sum of a dim": lambda x: x.sum(0),
    "mean of a dim": lambda x: x.mean(-1),
    "norm of a dim": lambda x: x.norm(dim=-1),
    "max of a dim": lambda x: x.max(0),
    "argmax": lambda x: x.argmax(),
    "sort": lambda x: x.sort(),
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(0),
    "std": lambda x: x.std(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x),
    "triu": lambda x: x.triu(),
    "expand": lambda x: x.expand(2, 7, 3),
    "bernoulli": lambda x: x.bernoulli(),
    "resize": lambda x: x.resize_(3, 7),
    "set": lambda x: x.set_(torch.ones(1)),
    "plain of full shape": lambda x: x + torch.ones(7, 3),
    "row vector": lambda x: x + torch.ones(3),
    "column": lambda x: x * torch.ones(7, 1),
    "in place from plain": lambda x: x.add_(torch.ones(7, 3)),
    "plain in place": lambda x: torch.ones(7, 3).add_(x),
    "plain copy": lambda x: torch.ones(7, 3).copy_(x),
    "plain out": lambda x: torch.add(x, x, out=torch.ones(7, 3)),
    "out of plain": lambda x: torch.add(torch.ones(1), 1, out=x),
    "broadcast copy": lambda x: x.copy_(torch.ones(3)),
    "foreach plain": lambda x: torch._foreach_add_([x], [torch.ones(7, 3)]),
    "foreach max": lambda x: torch._foreach_max([x]),
    "one tensor for a list": lambda x: torch._foreach_mul([torch.ones(2)], x),
    "equal to plain": lambda x: torch.equal(x, torch.ones(7, 3)),
    "equal to one element": lambda x: torch.equal(x, torch.ones(1)),
    "plain equal": lambda x: torch.equal(torch.ones(7, 3), x),
    "uninitialised": lambda x: x.new_empty((3, 7)),
    "channels last": lambda x: x.clone(memory_format=torch.channels_last),
    "dtensor": lambda x: x + DTensor.from_local(torch.ones(7, 3), x.device_mesh, [Replicate()], run_check=False),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_op_without_a_right_local_form_names_itself_and_full_tensor(name):
    tensor = shard(values(), cuts_of(mesh_of()))[0]
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"aten\.\S+ does not work.*full_tensor\(\)"):
        REFUSED[name](tensor)


def test_tensors_that_are_cut_differently_do_not_mix():
    cuts = cuts_of(mesh_of(), [[((7, 3), 0), ((7, 3), 0)]])
    x, y = shard([torch.ones(7, 3)] * 2, cuts)
    with torch.no_grad():
        for op in (
            lambda: x + y,
            lambda: x.add_(y),
            lambda: x.copy_(y),
            lambda: torch.equal(x, y),
            lambda: torch._foreach_add_([x], [y]),
            lambda: torch.add(x, x, out=y),
        ):
            with pytest.raises(NotImplementedError, match=r"cut differently.*full_tensor"):
                op()


def test_raw_memory_of_a_sharded_tensor_is_not_handed_out():
    tensor = shard(values(), cuts_of(mesh_of()))[0]
    for read in (tensor.numpy, tensor.tolist, lambda: tensor.__array__(), lambda: float(tensor)):
        with pytest.raises((RuntimeError, ValueError)):
            read()
    assert tensor.data_ptr() == 0 and not tensor.is_pinned()


def test_a_sharded_tensor_of_each_case_refuses_to_be_a_matrix():
    for tensor, (shape, _) in zip(shard(values(), cuts_of(mesh_of())), CASES, strict=True):
        with pytest.raises(NotImplementedError, match="full_tensor"):
            tensor.reshape(torch.Size(shape).numel(), 1)
