"""Bytes between the ranks of a group, as uint8 tensors on the device that the group's backend serves."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fxshard import _torch


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors for collectives over `group` must be: the CPU for gloo, this rank's CUDA device for nccl."""
    kind = _torch.collective_device_type(group)
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def padded(data: bytes | bytearray | memoryview, length: int, device: torch.device) -> torch.Tensor:
    """`data` followed by zeros: uint8, `length` elements, on `device`."""
    tensor = torch.zeros(length, dtype=torch.uint8, device="cpu")
    if len(data):
        tensor[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tensor.to(device)


def write(piece: torch.Tensor, buffer: bytearray, offset: int) -> None:
    """Copy the uint8 tensor `piece` into `buffer` from byte `offset` on, as far as `buffer` goes."""
    length = min(piece.numel(), len(buffer) - offset)
    if length > 0:
        torch.frombuffer(buffer, dtype=torch.uint8)[offset : offset + length] = piece[:length].cpu()


def all_gather_lengths(length: int, group: dist.ProcessGroup | None) -> list[int]:
    """Every member's `length` in group-rank order. Collective over `group`."""
    mine = torch.tensor([length], dtype=torch.int64, device=device_of(group))
    all_lengths = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_lengths, mine, group=group)
    return [int(each.item()) for each in all_lengths]


def all_gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytearray]:
    """Every member's `data`, lengths may differ, in group-rank order. Collective over `group`."""
    buffers = [bytearray(length) for length in all_gather_lengths(len(data), group)]
    longest = max(len(buffer) for buffer in buffers)
    mine = padded(data, longest, device_of(group))
    pieces = [torch.empty_like(mine) for _ in buffers]
    dist.all_gather(pieces, mine, group=group)
    for piece, buffer in zip(pieces, buffers, strict=True):
        write(piece, buffer, 0)
    return buffers


def broadcast_bytes(data: bytes | None, src: int) -> bytes | bytearray:
    """`data` of global rank `src` on every rank; others pass None. Collective over the default group."""
    device = device_of(None)
    length = torch.tensor([0 if data is None else len(data)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=src)
    if data is not None:
        dist.broadcast(padded(data, len(data), device), src=src)
        return data
    buffer = bytearray(int(length.item()))
    piece = torch.empty(len(buffer), dtype=torch.uint8, device=device)
    dist.broadcast(piece, src=src)
    write(piece, buffer, 0)
    return buffer
