"""FSDP2 over a decoder model: each layer, then the root, with parameters of another dtype left out."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxshard.distributed.layers import OffDtype, find_layers, off_dtype, warn_off_dtype
from fxshard.distributed.queries import is_initialized

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def fsdp2_wrap(
    model: nn.Module,
    shard_root: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    cpu_offload: bool = False,
) -> list[nn.Module]:
    """Shard `model` over the whole world with FSDP2's `fully_shard`; returns the decoder layers, the same objects.

    Wraps each layer, then the root unless `shard_root` is False (embedding, head and final norm then stay replicated).
    Every wrap reshards after forward. mp_policy None leaves FSDP2's default; cpu_offload rests the shards on the CPU.
    Collective over the whole world: `fully_shard` builds its mesh there, so it needs a live group.

    FSDP2 refuses a shard group of mixed dtypes, at first use rather than at the wrap. Parameters of a dtype other than
    the one with most elements are therefore left out: they stay whole on every rank, keep their dtype and type, are
    moved to the device that the shards compute on, and get no gradient synchronisation. Rank 0 warns about them.

    RuntimeError without a group, or if no layers are found. A warning if nothing got sharded.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    if not is_initialized():
        raise RuntimeError(
            "fsdp2_wrap shards over the ranks of a process group, but none is set up; call it inside "
            "`with distributed_run():` on a launch, or after torch.distributed.init_process_group()"
        )
    layers = find_layers(model)
    wrapped = [*layers, model] if shard_root else layers
    off = off_dtype(model).within(wrapped)

    options: dict[str, Any] = {"reshard_after_forward": True, "ignored_params": set(off.parameters.values())}
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    if cpu_offload:
        # Pinned memory speeds up copies to an accelerator and cannot be had without one.
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    for module in wrapped:
        fully_shard(module, **options)

    device = _compute_device(model)
    if device is None:
        warnings.warn(f"fsdp2_wrap sharded no parameter of {type(model).__name__}", stacklevel=2)
        return layers
    _move(off, device)
    warn_off_dtype(off, "FSDP2 leaves them replicated, without gradient synchronisation")
    return layers


def _compute_device(model: nn.Module) -> torch.device | None:
    """Where the shards compute: by their mesh, since offloaded shards rest on the CPU. None if nothing is sharded."""
    from torch.distributed.tensor import DTensor

    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            kind = parameter.device_mesh.device_type
            return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    return None


def _move(off: OffDtype, device: torch.device) -> None:
    """Move the parameters in place, as `fully_shard` moves those it takes. Meta parameters have no data to move."""
    for parameter in off.parameters.values():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
