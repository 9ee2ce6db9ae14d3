"""The per-parameter collectives: what a captured graph holds before any pass, and the meaning every pass must keep.

``fxshard::gather_param(flat_shard, bucket, index)``  the full parameter, gather dtype; one all-gather.
``fxshard::reduce_grad(grad, bucket, index)``         its gradient's share of the flat shard: reduced rows at their
                                                      place, zeros elsewhere, storage dtype; one reduce-scatter.
``fxshard::param_view(gathered, bucket, index)``      a full parameter out of the gathered buffer (after bucketing).
``fxshard::pack_grads(grads, bucket, ids)``           the reduce-scatter input from full gradients (after bucketing).

The first two are collective over the bucket's mesh; each is the backward of the other's direction. All have eager
kernels, so a graph runs at every stage of the pipeline and the unfused graph is the oracle of the fused one. The bucket
is named by its registry key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxshard import comm
from fxshard.bucket import ParamBucket
from fxshard.registry import lookup


def _padded_rows(bucket: ParamBucket, index: int) -> tuple[list[tuple[int, int]], int]:
    """(first row, rows) of each rank, and the most rows that one rank holds."""
    cut = bucket.slots[index].cut
    rows = [cut.rows(r) for r in range(bucket.groups.shard_size)]
    return rows, max(n for _, n in rows)


@torch.library.custom_op("fxshard::gather_param", mutates_args=())
def gather_param(flat_shard: Tensor, bucket: str, index: int) -> Tensor:
    b = lookup(bucket)
    slot = b.slots[index]
    slab = b.slab(flat_shard, index).to(b.dtypes.gather)
    rows, longest = _padded_rows(b, index)
    padded = slab.new_zeros(longest, *slab.shape[1:])
    padded[: slab.shape[0]] = slab
    pieces = comm.all_gather(padded.flatten(), b.groups).view(len(rows), *padded.shape)
    full = torch.cat([piece[:n] for piece, (_, n) in zip(pieces, rows, strict=True)])
    return slot.full_view(full)


@gather_param.register_fake
def _(flat_shard: Tensor, bucket: str, index: int) -> Tensor:
    b = lookup(bucket)
    b.check_materialised()
    stored = flat_shard.new_empty(b.layout.tensor_shapes[index], dtype=b.dtypes.gather)
    return b.slots[index].full_view(stored)


@torch.library.custom_op("fxshard::reduce_grad", mutates_args=())
def reduce_grad(grad: Tensor, bucket: str, index: int) -> Tensor:
    b = lookup(bucket)
    b.note_reduced([index])
    stored = grad.to(b.dtypes.reduce).movedim(b.slots[index].cut.dim, 0)
    rows, longest = _padded_rows(b, index)
    padded = stored.new_zeros(len(rows), longest, *stored.shape[1:])
    for piece, (first, n) in zip(padded, rows, strict=True):
        piece[:n] = stored[first : first + n]
    reduced = comm.reduce_mean(padded.flatten(), b.groups, b.divisor).view(padded.shape[1:])
    share = reduced.new_zeros(b.flat.numel(), dtype=b.dtypes.storage)
    slab = b.slab(share, index)
    slab.copy_(reduced[: slab.shape[0]])
    return share


@reduce_grad.register_fake
def _(grad: Tensor, bucket: str, index: int) -> Tensor:
    b = lookup(bucket)
    return grad.new_empty(b.flat.numel(), dtype=b.dtypes.storage)


def _setup_context(ctx: Any, inputs: tuple[Tensor, str, int], output: Tensor) -> None:
    ctx.where = inputs[1:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    if grad.layout is not torch.strided:
        grad = grad.to_dense()  # of nn.Embedding(sparse=True); a reduce-scatter sends dense buffers
    return torch.ops.fxshard.reduce_grad(grad, *ctx.where), None, None


gather_param.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("fxshard::param_view", mutates_args=())
def param_view(gathered: Tensor, bucket: str, index: int) -> Tensor:
    b = lookup(bucket)
    r = b.layout.get_tensor_range(index)
    # A custom op may not return an alias; the graph op that replaces this one is a view.
    return b.slots[index].full_view(gathered[r.start : r.end].clone())


@param_view.register_fake
def _(gathered: Tensor, bucket: str, index: int) -> Tensor:
    b = lookup(bucket)
    return b.slots[index].full_view(gathered.new_empty(b.layout.tensor_shapes[index]))


@torch.library.custom_op("fxshard::pack_grads", mutates_args=())
def pack_grads(grads: Sequence[Tensor], bucket: str, ids: Sequence[int]) -> Tensor:
    b = lookup(bucket)
    full: list[Tensor | None] = [None] * len(b.slots)
    for i, grad in zip(ids, grads, strict=True):
        grad = grad.to(b.dtypes.reduce)
        before = full[i]
        full[i] = grad if before is None else before + grad
    return b.pack(full)


@pack_grads.register_fake
def _(grads: Sequence[Tensor], bucket: str, ids: Sequence[int]) -> Tensor:
    b = lookup(bucket)
    return grads[0].new_empty(b.layout.size, dtype=b.dtypes.reduce)
