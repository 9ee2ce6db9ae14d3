"""Collectives on whole buffers, as eager code calls them. Graphs hold the same ops as nodes.

Every function here is collective over the group it names and does nothing where that group is None (size 1).
Backends know no complex numbers, so complex buffers travel as pairs of reals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxshard.mesh import MeshGroups, MeshPart
from fxshard.reduction import Reduction

c10d = torch.ops._c10d_functional


def all_gather(segment: Tensor, groups: MeshGroups) -> Tensor:
    """Every rank's ``segment`` (1-D, equal lengths) end to end: 1-D, ``shard_size`` times as long, same dtype.

    At shard size 1 the segment itself comes back.
    """
    if groups.gather is None:
        return segment
    return finish_all_gather(start_all_gather(segment, groups.shard_size, groups.gather), segment)


def gather_parts(part: Tensor, kept: MeshPart) -> Tensor:
    """``all_gather`` from the ranks that share a gathered buffer, each of which has a ``part`` of it."""
    return finish_all_gather(start_all_gather(part, kept.size, kept.group), part)


def start_all_gather(segment: Tensor, ranks: int, group: str | None) -> Tensor:
    """Launch ``all_gather`` over more than one rank; ``finish_all_gather`` waits for what comes back."""
    return c10d.all_gather_into_tensor(_real(segment).contiguous(), ranks, group)


def finish_all_gather(started: Tensor, segment: Tensor) -> Tensor:
    """What ``all_gather`` of ``segment`` gives, from what ``start_all_gather`` gave."""
    return _like(segment, c10d.wait_tensor(started))


def reduce_scatter(packed: Tensor, groups: MeshGroups, reduction: Reduction) -> Tensor:
    """This rank's segment of ``packed`` reduced over the shard ranks: the first stage of a reduction.

    ``packed`` is 1-D, ``shard_size`` segments of equal length, and may be overwritten. Same dtype.
    """
    return finish_reduce_scatter(start_reduce_scatter(packed, groups, reduction), packed, groups, reduction)


def start_reduce_scatter(packed: Tensor, groups: MeshGroups, reduction: Reduction) -> Tensor:
    """Launch ``reduce_scatter``; ``finish_reduce_scatter`` waits for what comes back."""
    if reduction.before != 1:
        packed.div_(reduction.before)
    if groups.reduce is None:
        return packed
    return c10d.reduce_scatter_tensor(_real(packed), reduction.op, groups.shard_size, groups.reduce)


def finish_reduce_scatter(started: Tensor, packed: Tensor, groups: MeshGroups, reduction: Reduction) -> Tensor:
    """What ``reduce_scatter`` of ``packed`` gives, from what ``start_reduce_scatter`` gave."""
    segment = packed if groups.reduce is None else _like(packed, c10d.wait_tensor(started))
    return segment if reduction.after_shard == 1 else segment.div_(reduction.after_shard)


def all_reduce(segment: Tensor, groups: MeshGroups, reduction: Reduction) -> Tensor:
    """``segment`` (1-D, may be overwritten) reduced over the replicas: the second stage. Same shape and dtype."""
    return finish_all_reduce(start_all_reduce(segment, groups, reduction), segment, groups, reduction)


def start_all_reduce(segment: Tensor, groups: MeshGroups, reduction: Reduction) -> Tensor:
    """Launch ``all_reduce``; ``finish_all_reduce`` waits for what comes back."""
    return segment if groups.replicate is None else c10d.all_reduce(_real(segment), reduction.op, groups.replicate)


def finish_all_reduce(started: Tensor, segment: Tensor, groups: MeshGroups, reduction: Reduction) -> Tensor:
    """What ``all_reduce`` of ``segment`` gives, from what ``start_all_reduce`` gave."""
    if groups.replicate is not None:
        segment = _like(segment, c10d.wait_tensor(started))
    return segment if reduction.after_replicate == 1 else segment.div_(reduction.after_replicate)


def _real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer).flatten() if buffer.is_complex() else buffer


def _like(buffer: Tensor, received: Tensor) -> Tensor:
    return torch.view_as_complex(received.unflatten(0, (-1, 2))) if buffer.is_complex() else received
