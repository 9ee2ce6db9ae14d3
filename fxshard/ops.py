"""The per-parameter collectives: what a captured graph holds before any pass, and the meaning every pass must keep.

``fxshard::gather_param(flat_shard, bucket, index)``  the full parameter, gather dtype; one all-gather.
``fxshard::reduce_grad(grad, bucket, index)``         its gradient's share of the flat shard: reduced rows at their
                                                      place, zeros elsewhere, storage dtype; one reduction.
``fxshard::keep_part(flat_shard, bucket, ranks)``      1 / ``ranks`` of the gathered buffer: what this rank keeps of it
                                                      from forward to backward; one all-gather.
``fxshard::gather_part(part, bucket, index, ranks)``  the full parameter out of such parts; one all-gather.
``fxshard::scatter_grad(grad, bucket, index)``        ``reduce_grad`` over the shard dim alone, for a graph that
                                                      all-reduces the sum of shares itself.
``fxshard::param_view(gathered, bucket, index)``      a full parameter out of the gathered buffer (after bucketing).
``fxshard::pack_grads(grads, bucket, ids)``           the reduce-scatter input from full gradients (after bucketing).
``fxshard::concat(pieces, offsets, size)``            the same where offsets are known (after lowering); code generators
                                                      let what computes a piece write it to its place.
``fxshard::add_waiting(buffer, bucket, kept, stage)`` a buffer of gradients and those that waited for it since other
                                                      backwards (after bucketing).
``fxshard::take_part(gathered, bucket, ranks)``       this rank's part of a gathered buffer (after bucketing).

The first two are collective over the bucket's mesh; each is the backward of the other's direction. Both take a *stage*
(``fxshard.reduction.Stage``), how far gradients are reduced, a *sink* to which they flow where that is not all the way
(see ``fxshard.unreduced``), and a *scale*, a tensor of 0 dims that multiplies them. At stage "main" a share keeps the
reduce dtype, at stage "shard" it does and is reduced over the shard dim alone, at stage "none" it is not reduced at all
(and as long as the layout). What waits is not added here but reduced when backward ends.

All have eager kernels, so a graph runs at every stage of the pipeline and the unfused graph is the oracle of the fused
one. The bucket is named by its registry key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxshard import comm
from fxshard.bucket import ParamBucket
from fxshard.mesh import part_of
from fxshard.reduction import as_stage
from fxshard.registry import lookup


def _padded_rows(bucket: ParamBucket, index: int) -> tuple[list[tuple[int, int]], int]:
    """(first row, rows) of each rank, and the most rows that one rank holds."""
    cut = bucket.slots[index].cut
    rows = [cut.rows(r) for r in range(bucket.groups.shard_size)]
    return rows, max(n for _, n in rows)


@torch.library.custom_op("fxshard::gather_param", mutates_args=())
def gather_param(
    flat_shard: Tensor,
    bucket: str,
    index: int,
    stage: str = "all",
    sink: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    b = lookup(bucket)
    slot = b.slots[index]
    slab = b.slab(flat_shard, index).to(b.device, b.dtypes.gather)
    rows, longest = _padded_rows(b, index)
    padded = slab.new_zeros(longest, *slab.shape[1:])
    padded[: slab.shape[0]] = slab
    pieces = comm.all_gather(padded.flatten(), b.groups).view(len(rows), *padded.shape)
    full = torch.cat([piece[:n] for piece, (_, n) in zip(pieces, rows, strict=True)])
    return slot.full_view(full)


@gather_param.register_fake
def _(
    flat_shard: Tensor,
    bucket: str,
    index: int,
    stage: str = "all",
    sink: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    b = lookup(bucket)
    b.check_materialised()
    stored = flat_shard.new_empty(b.layout.tensor_shapes[index], dtype=b.dtypes.gather, device=b.device)
    return b.slots[index].full_view(stored)


@torch.library.custom_op("fxshard::reduce_grad", mutates_args=())
def reduce_grad(grad: Tensor, bucket: str, index: int, stage: str = "all", scale: Tensor | None = None) -> Tensor:
    b = lookup(bucket)
    b.note(as_stage(stage), [index])
    if stage == "none":  # what waits is scaled when it is reduced
        return b.pack([grad if i == index else None for i in range(len(b.slots))])
    share = _scattered(grad, b, index, scale)
    if stage == "shard":
        return share
    share = comm.all_reduce(share, b.groups, b.reduction)
    return share.to(b.flat.device, b.grad_dtype)


def _scattered(grad: Tensor, b: ParamBucket, index: int, scale: Tensor | None) -> Tensor:
    """A gradient's share of the segment, reduced over the shard dim: reduce dtype, zeros beside its rows."""
    grad = grad.to(b.dtypes.reduce)
    if scale is not None:
        grad = grad * scale
    stored = grad.movedim(b.slots[index].cut.dim, 0)
    rows, longest = _padded_rows(b, index)
    padded = stored.new_zeros(len(rows), longest, *stored.shape[1:])
    for piece, (first, n) in zip(padded, rows, strict=True):
        piece[:n] = stored[first : first + n]
    reduced = comm.reduce_scatter(padded.flatten(), b.groups, b.reduction).view(padded.shape[1:])
    share = reduced.new_zeros(b.segment_size)
    slab = b.slab(share, index)
    slab.copy_(reduced[: slab.shape[0]])
    return share


@reduce_grad.register_fake
def _(grad: Tensor, bucket: str, index: int, stage: str = "all", scale: Tensor | None = None) -> Tensor:
    b = lookup(bucket)
    if stage in ("all", "main"):
        return grad.new_empty(b.segment_size, dtype=b.grad_dtype, device=b.flat.device)
    return grad.new_empty(b.segment_size if stage == "shard" else b.layout.size, dtype=b.dtypes.reduce)


@torch.library.custom_op("fxshard::scatter_grad", mutates_args=())
def scatter_grad(grad: Tensor, bucket: str, index: int, scale: Tensor | None = None) -> Tensor:
    return _scattered(grad, lookup(bucket), index, scale)


@scatter_grad.register_fake
def _(grad: Tensor, bucket: str, index: int, scale: Tensor | None = None) -> Tensor:
    b = lookup(bucket)
    return grad.new_empty(b.segment_size, dtype=b.dtypes.reduce)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.bucket, ctx.index, ctx.stage, _, scale = inputs
    ctx.save_for_backward(*([scale] if scale is not None else []))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, Tensor | None, None]:
    if grad.layout is not torch.strided:
        grad = grad.to_dense()  # of nn.Embedding(sparse=True); a reduce-scatter sends dense buffers
    rest = () if ctx.stage == "all" and not ctx.saved_tensors else (ctx.stage, *ctx.saved_tensors)
    share = torch.ops.fxshard.reduce_grad(grad, ctx.bucket, ctx.index, *rest)
    to_flat, to_sink = (share, None) if ctx.stage == "all" else (None, share)
    return to_flat, None, None, None, to_sink, None


gather_param.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("fxshard::keep_part", mutates_args=())
def keep_part(flat_shard: Tensor, bucket: str, ranks: int) -> Tensor:
    b = lookup(bucket)
    gathered = comm.all_gather(flat_shard.to(b.device, b.dtypes.gather), b.groups)
    return part_of(b.mesh, ranks).take(gathered)


@keep_part.register_fake
def _(flat_shard: Tensor, bucket: str, ranks: int) -> Tensor:
    b = lookup(bucket)
    return flat_shard.new_empty(b.layout.size // ranks, dtype=b.dtypes.gather, device=b.device)


@torch.library.custom_op("fxshard::gather_part", mutates_args=())
def gather_part(part: Tensor, bucket: str, index: int, ranks: int) -> Tensor:
    b = lookup(bucket)
    return _full(comm.gather_parts(part, part_of(b.mesh, ranks)), b, index)


@gather_part.register_fake
def _(part: Tensor, bucket: str, index: int, ranks: int) -> Tensor:
    b = lookup(bucket)
    return b.slots[index].full_view(part.new_empty(b.layout.tensor_shapes[index]))


@torch.library.custom_op("fxshard::take_part", mutates_args=())
def take_part(gathered: Tensor, bucket: str, ranks: int) -> Tensor:
    return part_of(lookup(bucket).mesh, ranks).take(gathered)


@take_part.register_fake
def _(gathered: Tensor, bucket: str, ranks: int) -> Tensor:
    return gathered.new_empty(gathered.numel() // ranks)


@torch.library.custom_op("fxshard::param_view", mutates_args=())
def param_view(gathered: Tensor, bucket: str, index: int) -> Tensor:
    return _full(gathered, lookup(bucket), index)


def _full(gathered: Tensor, b: ParamBucket, index: int) -> Tensor:
    """A copy of a full parameter: a custom op may not return an alias; the graph op that replaces these is a view."""
    r = b.layout.get_tensor_range(index)
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


@torch.library.custom_op("fxshard::concat", mutates_args=())
def concat(pieces: Sequence[Tensor], offsets: Sequence[int], size: int) -> Tensor:
    """1-D, ``size`` elements: each piece (any shape, all of one dtype) at its offset, zeros elsewhere."""
    out = pieces[0].new_zeros(size)
    for piece, offset in zip(pieces, offsets, strict=True):
        out[offset : offset + piece.numel()].view(piece.shape).copy_(piece)
    return out


@concat.register_fake
def _(pieces: Sequence[Tensor], offsets: Sequence[int], size: int) -> Tensor:
    return pieces[0].new_empty(size)


@torch.library.custom_op("fxshard::add_waiting", mutates_args=())
def add_waiting(buffer: Tensor, bucket: str, kept: str, stage: str) -> Tensor:
    out = buffer.clone()
    _add_waiting(out, bucket, kept, stage)
    return out


@add_waiting.register_fake
def _(buffer: Tensor, bucket: str, kept: str, stage: str) -> Tensor:
    return torch.empty_like(buffer)


@torch.library.custom_op("fxshard::add_waiting_", mutates_args=("buffer",))
def add_waiting_(buffer: Tensor, bucket: str, kept: str, stage: str) -> None:
    _add_waiting(buffer, bucket, kept, stage)


def _add_waiting(buffer: Tensor, bucket: str, kept: str, stage: str) -> None:
    b = lookup(bucket)
    ids = b.unreduced.add_to(buffer, as_stage(kept))
    b.note(as_stage(stage), ids)
