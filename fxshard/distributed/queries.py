"""What this process knows about its launch and its live process group.

Two questions stay apart. A *launch* is what the environment says (`WORLD_SIZE` > 1); a *run of several ranks* is what
the default process group says. Either can hold without the other, so nothing here derives one from the other.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn


def is_available() -> bool:
    """True if torch.distributed is compiled in."""
    return dist.is_available()


def is_initialized() -> bool:
    """True if torch.distributed is available and the default process group exists."""
    return dist.is_available() and dist.is_initialized()


def backend() -> str | None:
    """The default group's backend (`"gloo"`, `"nccl"`, ...), None without a group."""
    return dist.get_backend() if is_initialized() else None


def rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank inside `group` (None: the world); 0 without a default group, -1 for a non-member."""
    if not is_initialized():
        return 0
    # A non-member of a sub-group holds an integer in its place.
    return -1 if isinstance(group, int) else dist.get_rank(group)


def size(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks of `group` (None: the world); 1 without a default group, -1 for a non-member."""
    if not is_initialized():
        return 1
    return -1 if isinstance(group, int) else dist.get_world_size(group)


def is_master(group: dist.ProcessGroup | None = None) -> bool:
    """True on rank 0 of `group` (None: the world)."""
    return rank(group) == 0


def env_int(name: str) -> int | None:
    """The environment variable `name` as an integer, None if unset or empty. ValueError if it is no integer."""
    text = os.environ.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"environment variable {name} must be an integer, got {text!r}; set it as the launcher does, or unset it"
        ) from None


def is_distributed_launch() -> bool:
    """True if the environment says several processes were launched (`WORLD_SIZE` > 1; unset or empty counts as 1).

    Looks at nothing else, so that it can be used before any group exists. ValueError if `WORLD_SIZE` is no integer.
    """
    return (env_int("WORLD_SIZE") or 1) > 1


def is_distributed_run() -> bool:
    """True if the default group exists and has more than one rank, whoever made it."""
    return is_initialized() and size() > 1


def is_fsdp2_model(model: nn.Module) -> bool:
    """True if any module of `model`, the root included, is wrapped by FSDP2's `fully_shard`."""
    if not is_available():
        return False
    from torch.distributed.fsdp import FSDPModule  # slow to import, and only there when distributed is

    return any(isinstance(module, FSDPModule) for module in model.modules())


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for every rank of `group` (None: the world). Collective over `group`.

    Does nothing where the default group has one rank or does not exist.
    """
    if size() == 1:
        return
    # Without device ids, nccl guesses a device and warns.
    device_ids = [torch.cuda.current_device()] if dist.get_backend(group) == "nccl" else None
    dist.barrier(group, device_ids=device_ids)


def check_group_of_launch(caller: str) -> None:
    """RuntimeError if this process was launched as one of several but no group is set up yet."""
    if not is_initialized() and is_distributed_launch():
        raise RuntimeError(
            f"{caller} needs the ranks of this launch (WORLD_SIZE={os.environ['WORLD_SIZE']}), but no process group is "
            "set up; call it inside `with distributed_run():` or after torch.distributed.init_process_group()"
        )
