"""Local and full values, parameters, copies and autograd of LayoutTensor."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from sharded_cases import BUCKETS, CASES, cuts_of, flat_view, mesh_of, shard, storage_shape, values
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from fxshard.layout import GlobalLayout
from fxshard.layout_tensor import LayoutTensor


def _one(index: int = 0, requires_grad: bool = False) -> LayoutTensor:
    tensor = shard(values(), cuts_of(mesh_of()))[index]
    return tensor.requires_grad_(requires_grad)


# ---- full values ----------------------------------------------------------------------------------------------------


def _full_tensor_is_the_value(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    fulls = values(dtype=dtype)
    for tensor, full in zip(shard(fulls, cuts_of(mesh_of(*sizes))), fulls, strict=True):
        whole = tensor.full_tensor()
        assert torch.equal(whole.view(torch.uint8), full.view(torch.uint8)) and whole.dtype == dtype
        assert type(whole) is torch.Tensor and whole.is_contiguous()
        whole.zero_()
        assert torch.equal(tensor.full_tensor(), full), "the full tensor is a copy"
        replicated = tensor.redistribute(placements=[Replicate()] * len(sizes))
        assert type(replicated) is DTensor and torch.equal(replicated.to_local(), full)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_two_ranks_gather_the_full_value(ranks2, dtype):
    ranks2.run(_full_tensor_is_the_value, (2,), dtype)


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (4, 1), (1, 4)])
def test_four_ranks_gather_the_full_value_on_1d_and_2d_meshes(ranks4, sizes):
    ranks4.run(_full_tensor_is_the_value, sizes, torch.float32)


def test_one_process_without_a_group_has_the_full_value():
    _full_tensor_is_the_value((1,), torch.float32)


def _whole_tensors_are_broadcast_by_their_owners() -> tuple[int, int]:
    shapes = [storage_shape(*case) for case in CASES]
    layout = GlobalLayout.build_for_tensor_atomic(shapes, dist.get_world_size(), tensor_owners=[3, 0, 3, 1, 0])
    fulls = values()
    tensors = shard(fulls, cuts_of(mesh_of(), [CASES], layout))
    with torch.profiler.profile() as profile:
        for tensor, full in zip(tensors, fulls, strict=True):
            assert torch.equal(tensor.full_tensor(), full)
    counts = {event.key: event.count for event in profile.key_averages()}
    return counts.get("c10d::broadcast_", 0), counts.get("_c10d_functional::all_gather_into_tensor", 0)


def test_tensors_owned_by_one_of_many_ranks_are_broadcast_not_padded(ranks4):
    assert ranks4.run(_whole_tensors_are_broadcast_by_their_owners) == [(3, 2)] * 4  # short ones are gathered


def test_a_tensor_without_elements_has_a_full_value():
    tensor = shard([torch.empty(0, 4)], cuts_of(mesh_of(), [[((0, 4), 0)]]))[0]
    assert tensor.full_tensor().shape == (0, 4)


def test_on_the_meta_device_everything_has_a_shape_and_no_data():
    cut = cuts_of(mesh_of())[2]
    tensor = LayoutTensor.from_local_slab(torch.empty(cut.storage_shape, device="meta"), cut)
    assert tensor.is_meta and tensor.full_tensor().is_meta and tensor.full_tensor().shape == cut.shape
    assert torch.zeros_like(tensor, device="cpu").full_tensor().abs().sum() == 0
    with torch.no_grad():
        assert nn.init.normal_(tensor) is tensor and tensor.norm().is_meta


# ---- parameters -----------------------------------------------------------------------------------------------------


def test_a_layout_tensor_reports_the_full_tensor_and_aliases_the_flat_shard():
    for cut, (shape, _) in zip(cuts_of(mesh_of()), CASES, strict=True):
        flat = torch.zeros(cut.layout.size)
        tensor = flat_view(flat, cut)
        assert tensor.shape == shape and tensor.stride() == torch.empty(shape).stride() and tensor.is_contiguous()
        assert tensor.placements == cut.placements and tensor.device_mesh == cut.mesh and tensor.cut is cut
        tensor.add_(1)
        start, taken = cut.layout.tensor_to_offset[cut.index], torch.Size(shape).numel()
        assert flat[start : start + taken].sum() == flat.sum() == taken


def test_an_in_place_op_raises_the_version_counter_of_the_flat_shard():
    cuts = cuts_of(mesh_of())
    flat = torch.zeros(cuts[0].layout.size)
    params = [nn.Parameter(flat_view(flat, cut)) for cut in cuts[: len(BUCKETS[0])]]
    for write in (
        lambda: params[0].add_(1),
        lambda: params[1].copy_(torch.ones(2)),
        lambda: nn.init.normal_(params[1]),
        lambda: torch.add(params[0], 1, out=params[0]),
        lambda: torch._foreach_mul_(params, 2),
    ):
        before = flat._version
        with torch.no_grad():
            write()
        assert flat._version > before


def test_writing_a_parameter_between_forward_and_backward_is_an_error_when_the_flat_shard_was_saved():
    cuts = cuts_of(mesh_of())
    flat = nn.Parameter(torch.ones(cuts[0].layout.size))
    param = nn.Parameter(flat_view(flat.detach(), cuts[0]))
    loss = flat.pow(2).sum()
    with torch.no_grad():
        param.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_parameter_is_a_parameter_and_a_layout_tensor_and_a_dtensor():
    param = nn.Parameter(_one())
    assert isinstance(param, nn.Parameter) and isinstance(param, LayoutTensor) and isinstance(param, DTensor)
    assert param.requires_grad and param.is_leaf and param.cut == _one().cut
    module = nn.Module()
    module.weight = param
    assert dict(module.named_parameters())["weight"] is param
    assert param.to_local().data_ptr() == param._local_tensor.data_ptr()


def test_grad_takes_a_layout_tensor_of_the_same_shape():
    param = nn.Parameter(_one())
    param.grad = _one()
    assert isinstance(param.grad, LayoutTensor)
    with pytest.raises(RuntimeError, match="grad"):
        param.grad = _one(1)


def test_data_can_be_replaced_by_a_tensor_of_the_same_cut_only():
    param, other = nn.Parameter(_one()), _one() * 2
    param.data = other
    assert param.to_local().data_ptr() == other.to_local().data_ptr() and param.requires_grad
    param.data = other.to(torch.float64)
    assert param.dtype == torch.float64 == param.full_tensor().dtype
    for wrong in (torch.ones(7, 3), _one(1)):
        with pytest.raises(TypeError, match=r"same cut.*copy_"):
            param.data = wrong


def test_a_slab_of_another_shape_is_refused():
    cut = cuts_of(mesh_of())[0]
    with pytest.raises(ValueError, match=r"rank 0 of 1 owns rows 0:7 .* slab of shape \(6, 3\)"):
        LayoutTensor.from_local_slab(torch.ones(6, 3), cut)
    with pytest.raises(TypeError, match="from_local_slab"):
        LayoutTensor(torch.ones(7, 3), None, requires_grad=False)


def test_the_text_shows_the_cut_and_this_ranks_rows():
    text = repr(_one(2))
    assert text.startswith(
        "LayoutTensor(rows 0:5 of 5 along dim 1, shape=(4, 5), dtype=float32, device=cpu, mesh=(shard 1), local=tensor("
    )
    assert repr(nn.Parameter(_one())).startswith("Parameter containing:\nLayoutTensor(rows 0:7 of 7, shape=(7, 3)")
    assert "requires_grad=True" in repr(nn.Parameter(_one()))


# ---- copies ---------------------------------------------------------------------------------------------------------


def test_a_deep_copy_has_memory_of_its_own_and_keeps_attributes():
    param = nn.Parameter(_one(2))
    param.note = ["kept"]
    twin = copy.deepcopy(param)
    assert isinstance(twin, nn.Parameter) and twin.cut is param.cut and twin.note == ["kept"]
    assert twin.note is not param.note
    with torch.no_grad():
        twin.zero_()
    assert torch.equal(param.full_tensor(), values()[2])


def test_a_deep_copy_keeps_the_gradient_of_a_tensor_and_drops_that_of_a_parameter_as_torch_does():
    for kind in (lambda t: t.detach().clone().requires_grad_(), lambda t: nn.Parameter(t.detach().clone())):
        ours, plain = kind(_one(2)), kind(torch.ones(2))
        ours.grad, plain.grad = _one(2), torch.ones(2)
        mine, twin = copy.deepcopy(ours), copy.deepcopy(plain)
        assert (mine.grad is None) == (twin.grad is None)
        if mine.grad is not None:
            assert torch.equal(mine.grad.full_tensor(), ours.grad.full_tensor())
            assert mine.grad.to_local().data_ptr() != ours.grad.to_local().data_ptr()


def test_a_deep_copy_of_two_references_is_one_tensor():
    param = nn.Parameter(_one())
    first, second = copy.deepcopy([param, param])
    assert first is second


def test_a_tensor_with_history_cannot_be_copied_deeply():
    with pytest.raises(RuntimeError, match="leaf"):
        copy.deepcopy(nn.Parameter(_one()) * 2)


@pytest.mark.parametrize("save", [pickle.dumps, lambda t: torch.save(t, io.BytesIO()), copy.copy])
def test_pickling_is_refused_with_advice(save):
    with pytest.raises(RuntimeError, match=r"distributed\.checkpoint.*full_tensor"):
        save(_one())


# ---- autograd -------------------------------------------------------------------------------------------------------


def _gradients_through_full_values(sizes: tuple[int, ...]) -> None:
    mesh = mesh_of(*sizes)
    weight = torch.linspace(0, 1, dist.get_rank() + 2 if dist.is_initialized() else 2)[1]  # differs between ranks
    total = sum(torch.linspace(0, 1, r + 2)[1] for r in range(mesh.size()))
    for tensor, full in zip(shard(values(), cuts_of(mesh)), values(), strict=True):
        for placements, scale in (
            (None, torch.tensor(1.0)),
            ([Partial()] * len(sizes), total),
            ([Partial("avg")] * len(sizes), total / mesh.size()),
        ):
            param = nn.Parameter(tensor)
            loss = param.full_tensor(grad_placements=placements).pow(2).sum()
            (loss if placements is None else weight * loss).backward()
            torch.testing.assert_close(param.grad.full_tensor(), 2 * full * scale)
            assert param.grad.cut is param.cut and param.grad.to_local().stride() == param.to_local().stride()
        param = nn.Parameter(tensor)
        param.to_local().pow(2).sum().backward()
        torch.testing.assert_close(param.grad.full_tensor(), 2 * full)
        param = nn.Parameter(tensor)
        param.redistribute(placements=[Replicate()] * len(sizes)).to_local().pow(2).sum().backward()
        torch.testing.assert_close(param.grad.full_tensor(), 2 * full)


@pytest.mark.parametrize("sizes", [(2,), (1, 2), (2, 1)])
def test_gradients_flow_through_full_and_local_values(ranks2, sizes):
    ranks2.run(_gradients_through_full_values, sizes)


def _gradients_through_local_ops() -> None:
    for tensor, full in zip(shard(values(), cuts_of(mesh_of())), values(), strict=True):
        losses = {
            "square": lambda p: p.pow(2).sum(),
            "mean": lambda p: p.exp().sum() / p.numel(),
            "norm": lambda p: p.norm(),
            "masked": lambda p: torch.where(p > 0, p, 2 * p).exp().sum(),
            "inf norm": lambda p: p.norm(float("inf")),
        }
        for name, loss in losses.items():
            plain, param = full.clone().requires_grad_(), nn.Parameter(tensor)
            loss(plain).backward()
            loss(param).backward()
            torch.testing.assert_close(param.grad.full_tensor(), plain.grad, msg=name)


def test_gradients_flow_through_element_wise_ops_and_reductions(ranks2):
    ranks2.run(_gradients_through_local_ops)


def test_a_gradient_that_is_not_sharded_is_refused_where_it_meets_sharded_values():
    param = nn.Parameter(_one())
    with pytest.raises(NotImplementedError, match="not sharded in the same way"):
        param.pow(2).mean().backward()  # the backward of mean makes a plain tensor of the full shape
    param.grad = None
    param.sum().backward()
    assert torch.equal(param.grad, torch.ones(7, 3)) and type(param.grad) is torch.Tensor
    param.grad = param.grad.clone()
    with pytest.raises(NotImplementedError, match="not sharded in the same way"):
        torch.optim.SGD([param], foreach=False).step()


def test_other_placements_are_refused():
    param = nn.Parameter(_one())
    with pytest.raises(ValueError, match="grad_placements"):
        param.full_tensor(grad_placements=[Replicate(), Replicate()])
    with pytest.raises(NotImplementedError, match="full_tensor"):
        param.to_local(grad_placements=[Partial()])
    with pytest.raises(NotImplementedError, match="distribute_tensor"):
        param.redistribute(placements=[Partial()])
    with pytest.raises(NotImplementedError, match="distribute_tensor"):
        param.redistribute(placements=None)
    assert param.redistribute(placements=param.placements) is param
