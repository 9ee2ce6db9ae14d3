"""Collectives on whole buffers, as eager code calls them. Graphs hold the same ops as nodes.

Every function here is collective over the group it names and does nothing where that group is None (size 1).
Backends know no complex numbers, so complex buffers travel as pairs of reals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxshard.mesh import MeshGroups

c10d = torch.ops._c10d_functional


def all_gather(segment: Tensor, groups: MeshGroups) -> Tensor:
    """Every rank's ``segment`` (1-D, equal lengths) end to end: 1-D, ``shard_size`` times as long, same dtype.

    At shard size 1 the segment itself comes back.
    """
    if groups.gather is None:
        return segment
    if segment.is_complex():
        return torch.view_as_complex(all_gather(torch.view_as_real(segment).flatten(), groups).unflatten(0, (-1, 2)))
    out = c10d.all_gather_into_tensor(segment.contiguous(), groups.shard_size, groups.gather)
    return c10d.wait_tensor(out)


def reduce_mean(packed: Tensor, groups: MeshGroups, divisor: float) -> Tensor:
    """This rank's segment of the sum of ``packed`` over shard and replicate ranks, divided by ``divisor``.

    ``packed`` is 1-D, ``shard_size`` segments of equal length. Sum first and divide afterwards, in the dtype of
    ``packed``: one convention for every form of a step.
    """
    if packed.is_complex():
        real = reduce_mean(torch.view_as_real(packed).flatten(), groups, divisor)
        return torch.view_as_complex(real.unflatten(0, (-1, 2)))
    if groups.reduce is not None:
        packed = c10d.wait_tensor(c10d.reduce_scatter_tensor(packed, "sum", groups.shard_size, groups.reduce))
    if groups.replicate is not None:
        packed = c10d.wait_tensor(c10d.all_reduce(packed, "sum", groups.replicate))
    return packed if divisor == 1 else packed / divisor
