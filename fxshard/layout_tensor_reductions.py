"""Rules of LayoutTensor for reductions of the whole tensor to one value.

Each rank reduces its rows, the ranks of the shard dim exchange the results (one collective per op, also for a list of
norms) and combine them in rank order, so every rank gets the same plain 0-dim tensor bit for bit. Reductions along some
dims only are not here: their result would need a cut of its own.

Sums, products and norms of floats combine per-shard results: they agree with the unsharded ones up to rounding (in
float32 for 16-bit floats). Everything else is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fxshard.layout_tensor import LayoutTensor, Rule, refusal
from fxshard.layout_tensor_comm import gather_full, gather_values
from fxshard.layout_tensor_ops import local_lists, local_operand, note_writes

aten = torch.ops.aten


def _require_all_dims(func: Any, x: LayoutTensor, dim: Any) -> None:
    """Raises unless ``dim`` names every dim of the tensor, as None and () do."""
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    if dims and sorted(d % x.dim() for d in dims) != list(range(x.dim())):
        raise NotImplementedError(
            refusal(func, (x,), because=f"of reductions, only those over all dims work, not over dim={dim}")
        )


def _shaped(value: Tensor, x: LayoutTensor, keepdim: bool) -> Tensor:
    """A 0-dim result, or with ``keepdim`` one of as many dims as ``x``, each of size 1."""
    return value.reshape((1,) * x.dim()) if keepdim else value


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# ---- sums and products -----------------------------------------------------------------------------------------------


def _sum(func: Any, x: LayoutTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    _require_all_dims(func, x, dim)
    result = dtype or x.dtype
    local = x._local_tensor.sum(dtype=_accumulator(result) if result.is_floating_point else dtype)
    total = gather_values(local, x._cut.mesh).sum(0)
    return _shaped(total.to(result) if result.is_floating_point else total, x, keepdim)


def _mean(func: Any, x: LayoutTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    result = dtype or x.dtype
    if not (result.is_floating_point or result.is_complex):
        raise RuntimeError(f"mean of a {x.dtype} tensor has no default dtype; pass dtype=")
    return (_sum(func, x, dim, keepdim, dtype=_accumulator(result)) / x.numel()).to(result)


def _prod(func: Any, x: LayoutTensor, *, dtype: Any = None) -> Tensor:
    result = dtype or x.dtype
    local = x._local_tensor.prod(dtype=_accumulator(result) if result.is_floating_point else dtype)
    product = gather_values(local, x._cut.mesh).prod(0)
    return product.to(result) if result.is_floating_point else product


def _count_nonzero(func: Any, x: LayoutTensor, dim: Any = None) -> Tensor:
    _require_all_dims(func, x, dim)
    return gather_values(x._local_tensor.count_nonzero(), x._cut.mesh).sum(0)


# ---- extremes and truth ----------------------------------------------------------------------------------------------


def _extreme(func: Any, x: LayoutTensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """``max``, ``min``, ``amax`` and ``amin``; shards without rows take no part."""
    _require_all_dims(func, x, dim)
    whole = torch.amax if func.overloadpacket in (aten.max, aten.amax) else torch.amin
    if x.numel() == 0:
        raise IndexError(f"{func} of a tensor of shape {tuple(x.shape)} is not defined: it has no elements")
    local = x._local_tensor
    gathered = gather_values(whole(local) if local.numel() else local.new_zeros(()), x._cut.mesh)
    taking_part = [value for value, (_, count) in zip(gathered.unbind(), x._cut.all_rows, strict=True) if count]
    return _shaped(whole(torch.stack(taking_part)), x, keepdim)


def _truth(func: Any, x: LayoutTensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """``any`` and ``all``."""
    _require_all_dims(func, x, dim)
    whole = torch.any if func.overloadpacket is aten.any else torch.all
    return _shaped(whole(gather_values(whole(x._local_tensor), x._cut.mesh)), x, keepdim)


def _compare(func: Any, x: Any, y: Any, *options: Any, **named: Any) -> bool:
    """``equal`` and ``allclose`` of two tensors of equal cut, as a bool that is the same on all ranks."""
    if type(x) is not LayoutTensor or type(y) is not LayoutTensor:
        raise NotImplementedError(refusal(func, (x, y), because="it compares a sharded tensor with one that is not"))
    local = func(x._local_tensor, local_operand(func, y, x._cut, (x, y)), *options, **named)
    return bool(gather_values(torch.tensor(local, device=x.device), x._cut.mesh).all())


def _item(func: Any, x: LayoutTensor) -> Any:
    """``item()`` of a sharded tensor of one element, which one rank owns. Collective."""
    if x.numel() != 1:
        raise RuntimeError(f"a tensor with {x.numel()} elements cannot be converted to a scalar")
    return func(gather_full(x._local_tensor, x._cut))


# ---- norms -----------------------------------------------------------------------------------------------------------


def _norms(func: Any, tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The vector norm of each tensor, sharded or plain, in ``dtype`` (default its own): one collective per mesh."""
    order = float(order)
    by_mesh: dict[DeviceMesh, list[int]] = {}
    norms: dict[int, Tensor] = {}
    x: Any
    for i, x in enumerate(tensors):
        if x.is_complex():
            raise NotImplementedError(refusal(func, (x,), because="norms of complex tensors are not known"))
        if type(x) is LayoutTensor:
            by_mesh.setdefault(x._cut.mesh, []).append(i)
        else:
            norms[i] = torch.linalg.vector_norm(x, order, dtype=dtype)
    for mesh, ids in by_mesh.items():
        sharded = [tensors[i] for i in ids]
        combined = _combine_norms(gather_values(_local_norms(sharded, order, dtype), mesh), order)
        norms.update((i, n.to(dtype or tensors[i].dtype)) for i, n in zip(ids, combined.unbind(), strict=True))
    return [norms[i] for i in range(len(tensors))]


def _local_norms(tensors: Sequence[Any], order: float, dtype: torch.dtype | None) -> Tensor:
    """Norms of the local parts, (tensors,): float64 if any tensor or the result is, else float32.

    A part without elements has the norm that changes no other: infinity for a negative order, else 0.
    """
    wide = torch.float64 in {dtype or t.dtype for t in tensors}
    accumulator = torch.float64 if wide else torch.float32
    none = torch.full((), math.inf if order < 0 else 0.0, dtype=accumulator, device=tensors[0].device)
    filled = [t._local_tensor for t in tensors if t._local_tensor.numel()]
    values = iter(torch._foreach_norm(filled, order, accumulator) if filled else ())  # type: ignore[arg-type]
    if order < 0 and any(t.numel() == 0 for t in tensors):
        torch.linalg.vector_norm(none.new_empty(0), order)  # raises as it does for an unsharded empty tensor
    return torch.stack([next(values) if t._local_tensor.numel() else none for t in tensors])


def _combine_norms(gathered: Tensor, order: float) -> Tensor:
    """Norms of whole tensors, from those of their parts: (shards, tensors) to (tensors,).

    The norm of norms of the same order is the norm of all elements; order 0 counts, so counts add up.
    """
    return gathered.sum(0) if order == 0 else torch.linalg.vector_norm(gathered, order, dim=0)


def _foreach_norm(func: Any, tensors: Sequence[Tensor], order: Any = 2, dtype: Any = None) -> list[Tensor]:
    return _norms(func, tensors, order, dtype)


def _vector_norm(
    func: Any, x: LayoutTensor, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    _require_all_dims(func, x, dim)
    return _shaped(_norms(func, [x], 2 if order is None else order, dtype)[0], x, keepdim)


# ---- gradient scaling ------------------------------------------------------------------------------------------------


def _unscale(func: Any, grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """GradScaler's check: unscales the local parts; every rank of the shard dim learns of any rank's infinity."""
    unwrapped, cuts = local_lists(func, (grads,))
    func(unwrapped[0], found_inf, inv_scale)
    note_writes(unwrapped[0])
    meshes = dict.fromkeys(cut.mesh for cut in cuts if cut is not None)
    for mesh in meshes:
        found_inf.copy_(gather_values(found_inf, mesh).amax(0))


# ---- the table -------------------------------------------------------------------------------------------------------


def _spread(function: Any) -> Rule:
    """A rule out of a function that takes the op's arguments one by one, a sharded tensor (or a list) first."""

    def rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(args[0]) is not LayoutTensor and not isinstance(args[0], list | tuple):
            raise NotImplementedError(refusal(func, args, kwargs))
        return function(func, *args, **kwargs)

    return rule


def register(rules: dict[Any, Rule]) -> None:
    """Enter the rules of this module into the table."""
    by_function = {
        _sum: (aten.sum.default, aten.sum.dim_IntList),
        _mean: (aten.mean.default, aten.mean.dim),
        _prod: (aten.prod.default,),
        _count_nonzero: (aten.count_nonzero.default, aten.count_nonzero.dim_IntList),
        _extreme: (aten.max.default, aten.min.default, aten.amax.default, aten.amin.default),
        _truth: (aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims),
        _compare: (aten.equal.default, aten.allclose.default),
        _item: (aten._local_scalar_dense.default,),
        _vector_norm: (
            aten.linalg_vector_norm.default,
            aten.norm.Scalar,
            aten.norm.ScalarOpt_dim,
            aten.norm.ScalarOpt_dtype,
            aten.norm.ScalarOpt_dim_dtype,
        ),
        _foreach_norm: (aten._foreach_norm.Scalar,),
        _unscale: (aten._amp_foreach_non_finite_check_and_unscale_.default,),
    }
    for function, funcs in by_function.items():
        rule = _spread(function)
        rules.update((func, rule) for func in funcs)
