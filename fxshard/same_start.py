"""Every rank starts from the values of the first rank of the mesh, as with DDP.

Each rank keeps its own rows of the full parameters that it was given. If ranks were initialised differently, the model
would be stitched together from several initialisations, and train, a little worse. So ranks compare checksums, and
where one differs, the first rank's parameter is broadcast.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard.mesh import mesh_device

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def start_alike(params: Sequence[nn.Parameter], names: Sequence[str], mesh: DeviceMesh) -> None:
    """Make full parameters equal on all ranks of the mesh, in place; collective: one small all-reduce per mesh dim.

    Parameters on the meta device have no values and are left out. Warns once, naming parameters, if any differed.
    """
    ready = [(p, n) for p, n in zip(params, names, strict=True) if not p.is_meta]
    if mesh.size() == 1 or not ready:
        return
    sums = torch.stack([_checksum(p).to(mesh_device(mesh)) for p, _ in ready])
    extremes = torch.cat([sums, -sums])
    for dim in range(mesh.ndim):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    greatest, least = extremes[: len(ready)], -extremes[len(ready) :]
    different = (greatest != least).nonzero().flatten().tolist()
    for i in different:
        _broadcast(ready[i][0], mesh)
    if different:
        shown = ", ".join(ready[i][1] for i in different[:4]) + (", ..." if len(different) > 4 else "")
        warnings.warn(
            f"{len(different)} parameters had other values on other ranks ({shown}); the values of the first rank of "
            "the mesh are used. Seed all ranks alike before the model is built to save the broadcast",
            stacklevel=4,
        )


def _checksum(param: Tensor) -> Tensor:
    """The sum of the values' bits as integers: exact, so it does not depend on the order of summation."""
    values = param.detach()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    if values.dtype == torch.bool:
        return values.sum(dtype=torch.int64)
    return values.view(_INTEGERS[values.dtype.itemsize]).sum(dtype=torch.int64)


def _broadcast(param: nn.Parameter, mesh: DeviceMesh) -> None:
    values = param.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    sent = values.to(mesh_device(mesh), memory_format=torch.contiguous_format, copy=True)
    flat = sent.flatten().view(torch.uint8)  # backends do not know all dtypes
    for dim in range(mesh.ndim):
        dist.broadcast(flat, group=mesh.get_group(dim), group_src=0)
    values.copy_(sent)
