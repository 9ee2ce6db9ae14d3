"""Sharded tensors for tests: a few awkward shapes in one row-atomic bucket, on any mesh."""

from __future__ import annotations

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

# (logical shape, dim cut along). On 2 ranks: one uneven, one whole on each rank, two cut along an inner dim.
CASES = (((7, 3), 0), ((2,), 0), ((4, 5), 1), ((1, 6), 0), ((2, 3, 4), 2))


def mesh_of(*sizes: int) -> DeviceMesh:
    """The whole world as a (shard) or (replicate, shard) mesh; without a process group, this process alone."""
    if not dist.is_initialized():
        return _torch.mesh_of_one("cpu")
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),), mesh_dim_names=("replicate", "shard")[-len(sizes or (1,)) :])


def storage_shape(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (shape[dim], *shape[:dim], *shape[dim + 1 :])


def cuts_of(mesh: DeviceMesh, cases=CASES, layout: GlobalLayout | None = None) -> list[Cut]:
    """The cuts of one bucket; the padded row-atomic layout unless one is given."""
    shapes = [storage_shape(*case) for case in cases]
    layout = layout or GlobalLayout.build_for_row_atomic(shapes, mesh.size(mesh.ndim - 1))
    return [
        Cut(mesh, layout, i, dim, torch.Size(shape), Shard(dim) if dim else RowAtomic())
        for i, (shape, dim) in enumerate(cases)
    ]


def flat_views(flat: Tensor, cuts: list[Cut]) -> list[LayoutTensor]:
    """LayoutTensors that alias the segment ``flat``, as a bucket makes them."""
    result = []
    for cut in cuts:
        start, count = cut.own_rows
        row = cut.storage_shape[1:].numel()
        at = cut.layout.tensor_to_offset[cut.index] + start * row - cut.layout.rank_to_offset[cut.shard_rank]
        slab = flat[at : at + count * row] if count else flat[:0]
        result.append(LayoutTensor.from_local_slab(slab.view(count, *cut.storage_shape[1:]), cut))
    return result


def shard(fulls: list[Tensor], cuts: list[Cut]) -> list[LayoutTensor]:
    """``fulls`` (equal on all ranks) cut over the mesh, in one flat shard of their dtype."""
    flat = torch.zeros(cuts[0].layout.rank_size(cuts[0].shard_rank), dtype=fulls[0].dtype)
    tensors = flat_views(flat, cuts)
    for tensor, full in zip(tensors, fulls, strict=True):
        tensor.to_local().copy_(tensor.cut.own_part(full))
    return tensors


def values(seed: int = 0, cases=CASES, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random full values of the cases, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape, _ in cases]
