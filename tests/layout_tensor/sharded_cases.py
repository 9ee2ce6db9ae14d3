"""Sharded tensors for tests: a few awkward shapes in three row-atomic buckets, on any mesh."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from fxshard import _torch
from fxshard.cut import Cut
from fxshard.layout import GlobalLayout
from fxshard.layout_tensor import LayoutTensor
from fxshard.placement import RowAtomic

Case = tuple[tuple[int, ...], int]  # logical shape, dim cut along

# On 2 ranks: 4 + 3 rows, 0 + 2 rows; 3 + 2 rows along dim 1; 1 + 0 rows, 2 + 2 rows along dim 2.
BUCKETS: tuple[tuple[Case, ...], ...] = (
    (((7, 3), 0), ((2,), 0)),
    (((4, 5), 1),),
    (((1, 6), 0), ((2, 3, 4), 2)),
)
CASES: tuple[Case, ...] = tuple(chain(*BUCKETS))


def mesh_of(*sizes: int) -> DeviceMesh:
    """The whole world as a (shard) or (replicate, shard) mesh; without a process group, this process alone."""
    if not dist.is_initialized():
        return _torch.mesh_of_one("cpu")
    sizes = sizes or (dist.get_world_size(),)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def storage_shape(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (shape[dim], *shape[:dim], *shape[dim + 1 :])


def cuts_of(
    mesh: DeviceMesh, buckets: Sequence[Sequence[Case]] = BUCKETS, layout: GlobalLayout | None = None
) -> list[Cut]:
    """The cuts of all cases; padded row-atomic layouts, or ``layout`` for every bucket."""
    result = []
    for cases in buckets:
        shapes = [storage_shape(*case) for case in cases]
        plan = layout or GlobalLayout.build_for_row_atomic(shapes, mesh.size(mesh.ndim - 1))
        result += [
            Cut(mesh, plan, i, dim, torch.Size(shape), Shard(dim) if dim else RowAtomic())
            for i, (shape, dim) in enumerate(cases)
        ]
    return result


def flat_view(flat: Tensor, cut: Cut) -> LayoutTensor:
    """The LayoutTensor that aliases its rows in the segment ``flat``, as a bucket makes it."""
    start, count = cut.own_rows
    row = cut.storage_shape[1:].numel()
    at = cut.layout.tensor_to_offset[cut.index] + start * row - cut.layout.rank_to_offset[cut.shard_rank]
    slab = flat[at : at + count * row] if count else flat[:0]
    return LayoutTensor.from_local_slab(slab.view(count, *cut.storage_shape[1:]), cut)


def shard(fulls: Sequence[Tensor], cuts: Sequence[Cut]) -> list[LayoutTensor]:
    """``fulls`` (equal on all ranks, of one dtype) cut over the mesh, in one flat shard per layout."""
    flats = {id(cut.layout): torch.zeros(cut.layout.rank_size(cut.shard_rank), dtype=fulls[0].dtype) for cut in cuts}
    tensors = [flat_view(flats[id(cut.layout)], cut) for cut in cuts]
    for tensor, full in zip(tensors, fulls, strict=True):
        tensor.to_local().copy_(tensor.cut.own_part(full))
    return tensors


def values(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random full values of the cases, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape, _ in CASES]
