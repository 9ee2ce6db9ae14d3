"""Collectives over the shard dim of one cut: full values, and combining what each shard reduced locally.

Every function is collective over the shard dim of the cut's mesh (not over its replicate dim, whose ranks hold equal
values) and does nothing where that dim has one rank. Ranks take the same branches: cuts are equal on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fxshard import _torch
from fxshard.cut import Cut, to_logical_form, to_storage_form

c10d = torch.ops._c10d_functional


def gather_full(local: Tensor, cut: Cut) -> Tensor:
    """The full tensor, contiguous in logical dim order, in memory of its own; same dtype and device as ``local``.

    One all-gather of pieces padded to the largest shard where that moves at most about twice the tensor. A tensor on
    few of many ranks is broadcast by each rank that owns rows instead, so memory stays within three times the tensor.
    """
    if local.is_meta:
        return local.new_empty(cut.shape)
    slab = to_storage_form(local.detach(), cut.dim)
    if cut.shard_world == 1:
        stored = slab.clone(memory_format=torch.contiguous_format)
    else:
        device = _device_for_collectives(local, cut.mesh)
        slab = slab.to(device)
        most = max(count for _, count in cut.all_rows)
        evenly = cut.shard_world * most <= 2 * cut.row_count + cut.shard_world
        stored = (_gather_padded(slab, cut, most) if evenly else _broadcast_each(slab, cut)).to(local.device)
    return to_logical_form(stored, cut.dim).contiguous()


def _gather_padded(slab: Tensor, cut: Cut, most: int) -> Tensor:
    """All rows in storage form, from pieces of ``most`` rows."""
    rest = cut.storage_shape[1:]
    piece = slab.contiguous()
    if slab.size(0) < most:
        piece = slab.new_zeros((most, *rest))
        piece[: slab.size(0)].copy_(slab)
    # As bytes: not every backend gathers every dtype, and moving data needs no arithmetic.
    flat = piece.view(-1).view(torch.uint8)
    group = cut.mesh.get_group(cut.mesh.ndim - 1).group_name
    gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(flat, cut.shard_world, group))
    pieces = gathered.view(slab.dtype).view(cut.shard_world, most, *rest)
    if cut.shard_world * most == cut.row_count:
        return pieces.view(cut.storage_shape)
    stored = slab.new_empty(cut.storage_shape)
    for (start, count), padded in zip(cut.all_rows, pieces, strict=True):
        stored[start : start + count].copy_(padded[:count])
    return stored


def _broadcast_each(slab: Tensor, cut: Cut) -> Tensor:
    """All rows in storage form, broadcast by one owner after the other straight into their place."""
    stored = slab.new_empty(cut.storage_shape)
    group = cut.mesh.get_group(cut.mesh.ndim - 1)
    for rank, (start, count) in enumerate(cut.all_rows):
        if count:
            rows = stored[start : start + count]
            if rank == cut.shard_rank:
                rows.copy_(slab)
            dist.broadcast(rows.view(-1).view(torch.uint8), group=group, group_src=rank)
    return stored


def gather_values(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """``values`` (any shape, equal on all ranks) of each rank of the shard dim, stacked: (ranks, *shape).

    What to reduce is gathered rather than reduced in flight: NaN survives a maximum, any dtype works, and the result
    is the same bit for bit on every rank.
    """
    world = mesh.size(mesh.ndim - 1)
    if world == 1 or values.is_meta:
        return values.unsqueeze(0)
    flat = values.to(_device_for_collectives(values, mesh)).contiguous().view(-1).view(torch.uint8)
    gathered = c10d.all_gather_into_tensor(flat, world, mesh.get_group(mesh.ndim - 1).group_name)
    return c10d.wait_tensor(gathered).view(values.dtype).view(world, *values.shape).to(values.device)


def full_value(source: DTensor, mesh: DeviceMesh) -> Tensor | None:
    """The full value of a DTensor that torch distributed, e.g. while it loads a state dict; None if its parts are not
    those of ``torch.chunk``. Collective over the shard dim of ``mesh`` and over the source's mesh.

    Torch copies placements from the tensors that it loads into: these may state a cut's rows, but ``distribute_tensor``
    scatters in chunks all the same.
    """
    placements = [Shard(p.dim) if isinstance(p, Shard) else p for p in source.placements]
    local = source.to_local()
    chunk = _torch.local_shape(source.shape, source.device_mesh, placements)
    fits = torch.tensor([local.shape == chunk], device=local.device)
    if not bool(gather_values(fits, mesh).all()):
        return None
    shape, stride = source.shape, source.stride()
    return DTensor.from_local(local, source.device_mesh, placements, shape=shape, stride=stride).full_tensor()


def reduce_over(grad: Tensor, op: str, mesh: DeviceMesh, dim: int) -> Tensor:
    """``grad`` reduced by ``op`` ("sum", "avg", ...) over one dim of the mesh. Collective over that dim."""
    if mesh.size(dim) == 1 or grad.is_meta:
        return grad
    return c10d.wait_tensor(c10d.all_reduce(grad.contiguous(), op, mesh.get_group(dim).group_name))


@contextmanager
def generator_of_first_rank(
    generator: torch.Generator | None, device: torch.device, mesh: DeviceMesh
) -> Iterator[None]:
    """Draw as the first rank of ``mesh`` would: its generator state in place of this rank's (the device's default one).

    Collective over all dims of the mesh. Where this rank's state was the same, the draws advance it; otherwise it is as
    before afterwards.
    """
    if mesh.size() == 1 or device.type == "meta":
        yield
        return
    get: Callable[[], Tensor]
    set_: Callable[[Tensor], Any]
    if generator is not None:
        get, set_ = generator.get_state, generator.set_state
    elif device.type == "cpu":
        get, set_ = torch.get_rng_state, torch.set_rng_state
    else:
        module = torch.get_device_module(device)
        get, set_ = partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)
    own = get()
    shared = own.to(torch.device(mesh.device_type), copy=True)
    for dim in range(mesh.ndim):
        dist.broadcast(shared, group=mesh.get_group(dim), group_src=0)
    shared = shared.to(own.device)
    if torch.equal(own, shared):
        yield
        return
    set_(shared)
    try:
        yield
    finally:
        set_(own)


def _device_for_collectives(tensor: Tensor, mesh: DeviceMesh) -> torch.device:
    """Where collectives over the mesh work: shards that were offloaded to the CPU travel through its own device."""
    if tensor.device.type == mesh.device_type:
        return tensor.device
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
