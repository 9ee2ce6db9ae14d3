"""Bytes and state dicts of every rank, collected on one of them in bounded pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fxshard.distributed.codec import decode
from fxshard.distributed.envelope import Envelope, attempt
from fxshard.distributed.queries import check_group_of_launch, is_initialized, rank, size
from fxshard.distributed.transport import all_gather_bytes, all_gather_lengths, device_of, padded, write


def gather_bytes(
    data: bytes | bytearray | memoryview,
    dst: int,
    group: dist.ProcessGroup | None = None,
    chunk_bytes: int = 268435456,
) -> list[bytearray] | None:
    """Every member's `data` on global rank `dst`, in group-rank order; None on the others. Collective over `group`.

    Lengths may differ and may be 0. At most `chunk_bytes` bytes per rank move at a time, so that `dst` holds about
    group size × `chunk_bytes` bytes in flight beside the result. Nothing is decoded.

    Raises before any communication: `ValueError` if `chunk_bytes` is not positive, or `dst` or this process is not in
    `group`; `RuntimeError` on a launch without a group.
    """
    _check_members("gather_bytes", dst, group)
    if chunk_bytes <= 0:
        raise ValueError(f"gather_bytes: chunk_bytes must be positive, got {chunk_bytes}")
    # Flat, so that len() counts bytes whatever the item size.
    flat = memoryview(data).cast("B")
    if size(group) == 1:
        return [bytearray(flat)]

    lengths = all_gather_lengths(len(flat), group)
    buffers = [bytearray(length) for length in lengths] if rank() == dst else None
    device = device_of(group)
    for offset in range(0, max(lengths), chunk_bytes):
        # Equal pieces on every rank, as gather needs; those that run out pad.
        width = min(chunk_bytes, max(lengths) - offset)
        mine = padded(flat[offset : offset + width], width, device)
        pieces = None if buffers is None else [torch.empty_like(mine) for _ in buffers]
        dist.gather(mine, pieces, dst=dst, group=group)
        for piece, buffer in zip(pieces or [], buffers or [], strict=True):
            write(piece, buffer, offset)
    return buffers


def gather_state_dicts(
    state: dict[Any, Any], dst: int, group: dist.ProcessGroup | None = None
) -> Iterator[dict[Any, Any]]:
    """Every member's `state` on global rank `dst`, in group-rank order; nothing on the others. Collective over `group`.

    All communication happens in the call, so a `dst` that never iterates keeps nobody waiting. The iterator decodes
    one dict at a time, tensors on the CPU, and drops its bytes: `dst` holds the encoded dicts and one decoded one.
    A single process gets one decoded copy. State dicts must hold local tensors, a DTensor would arrive as a shard.

    Raises as `gather_bytes` does, before any communication. If some member's `state` cannot be sent, that member raises
    the encoding error and every other one a `RuntimeError` naming the first such global rank.
    """
    label = "gather_state_dicts"
    _check_members(label, dst, group)
    sent, failure = attempt(label, lambda: state)
    if size(group) > 1:
        # Agreed on before the transfer: a member that cannot send must not be waited for.
        status = Envelope(label, sent.status, sent.detail)
        got = [Envelope.unpack(data) for data in all_gather_bytes(status.pack(), group)]
        failed = [member for member, each in enumerate(got) if each.status != "ok"]
        if failed and failure is None:
            source = failed[0] if group is None else dist.get_global_rank(group, failed[0])
            raise RuntimeError(f"{label}: the state of rank {source} cannot be sent: {got[failed[0]].detail}")
    if failure is not None:
        raise failure
    return _decode_each(gather_bytes(sent.payload, dst, group) or [])


def _decode_each(buffers: list[bytearray]) -> Iterator[dict[Any, Any]]:
    buffers.reverse()
    while buffers:
        yield decode(buffers.pop())


def _check_members(caller: str, dst: int, group: dist.ProcessGroup | None) -> None:
    check_group_of_launch(caller)
    if isinstance(group, int):
        raise ValueError(f"{caller}: this process (rank {rank()}) is not a member of the group; only members may call")
    members = dist.get_process_group_ranks(group) if is_initialized() else [0]
    if dst not in members:
        raise ValueError(f"{caller}: dst must be a global rank in the group {members}, got {dst!r}")
