"""A run: one process, or the ranks of a launch, from setting the process group up to taking it down."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from fxshard import _torch
from fxshard.distributed.groups import DistributedState
from fxshard.distributed.queries import (
    backend,
    barrier,
    env_int,
    is_distributed_launch,
    is_distributed_run,
    is_initialized,
    rank,
    size,
)
from fxshard.distributed.watch import Watch


@contextlib.contextmanager
def distributed_run(
    timeout: timedelta | None = None, device: str | torch.device | None = None
) -> Iterator[DistributedState]:
    """The block is one process's part of a run; gives its rank, world size and device.

    On a launch (`WORLD_SIZE` > 1) it binds the device and sets the default group up: nccl on `cuda:LOCAL_RANK`, gloo on
    "cpu". device None means "cuda" where CUDA is available, else "cpu". Without a launch it sets nothing up.
    timeout: of the group that it sets up; a warning if a caller's group of several ranks is there already.
    Entry and exit are collective over the default group, except in a single process.

    Whoever set the group up takes it down. If no group was there at entry, then at the end
    - normally or by `SystemExit`: wait for the peers (gloo: a barrier) and destroy the group. A `SystemExit` must
      therefore be every rank's, as those of `broadcast_from` and `all_reduce` are; a lone one waits for the timeout.
    - by another exception in a run of several ranks: `abort()`, since taking the group down could wait for peers inside
      a collective that this rank never reaches. The launcher ends the job. In a single process: destroy and propagate.
    A group that was there at entry is left alone, and every exception propagates.
    In a run of several ranks that it set up, ranks keep watch over each other meanwhile (`fxshard.distributed.watch`):
    the error of every rank says which rank failed, hangs or is gone, and where.

    Raises at entry, changing nothing: `ValueError` for a device that the launch does not bind, a bad environment
    variable or a timeout of another type; `RuntimeError` if CUDA is asked for and not available.
    """
    if timeout is not None and not isinstance(timeout, timedelta):
        raise ValueError(f"distributed_run: timeout must be a datetime.timedelta or None, got {timeout!r}")
    launch = is_distributed_launch()
    bound = _resolve_device(device, launch)
    owned = not is_initialized()
    if launch and bound.type == "cuda":
        torch.cuda.set_device(bound)
    if launch and owned:
        _init_group(bound, timeout)
    elif not owned and timeout is not None and is_distributed_run():
        warnings.warn(
            f"distributed_run: timeout={timeout} cannot be applied, the process group of {size()} ranks was set up by "
            "the caller; give the timeout to init_process_group",
            stacklevel=3,
        )
    watch = _watch(bound) if owned and is_distributed_run() else None
    try:
        yield DistributedState(rank(), size(), bound)
    except SystemExit as exit:
        if owned:
            _destroy_with_peers(watch, f"by SystemExit({exit.code!r})")
        raise
    except BaseException as error:
        if owned and is_distributed_run():
            if watch is not None:
                watch.failed(error)
            abort()
        if owned and is_initialized():
            dist.destroy_process_group()
        raise
    else:
        if owned:
            _destroy_with_peers(watch, "at its end")
    finally:
        if watch is not None:
            watch.stop()


def _watch(device: torch.device) -> Watch:
    """This rank's watch over the default group, which serves `device`."""
    limit = _torch.group_timeout(None, device.type)
    assert limit is not None  # gloo and nccl say
    return Watch(_torch.default_store(), rank(), size(), limit)


def abort() -> NoReturn:
    """End this process at once with exit code 1, after printing the current traceback and flushing both streams.

    No `finally`, no atexit handler and no teardown runs: any of them could wait for peers that wait for this rank.
    """
    try:
        print(f"fxshard.distributed: rank {rank()} of {size()} aborts", file=sys.stderr)
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a closed pipe must not keep the other stream from being flushed
                stream.flush()
    finally:
        os._exit(1)


def _resolve_device(device: str | torch.device | None, launch: bool) -> torch.device:
    """The device to compute on; on a launch, the one to bind, with its index."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        asked = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"distributed_run: {device!r} names no device: {error}") from None
    if asked.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"distributed_run: device {str(asked)!r} was asked for, but CUDA is not available here")
    if not launch or asked.type == "cpu":
        return asked
    if asked.type != "cuda":
        raise ValueError(
            f"distributed_run: a launch binds 'cuda' or 'cpu', got device {str(asked)!r}; leave device out to let it "
            "choose"
        )
    local = torch.device("cuda", _local_index())
    if asked.index not in (None, local.index):
        raise ValueError(
            f"distributed_run: device {str(asked)!r} was asked for, but this rank's launch binds {str(local)!r}; ask "
            "for 'cuda' and let the launcher number the ranks"
        )
    return local


def _local_index() -> int:
    """This rank's index among those of its machine."""
    local = env_int("LOCAL_RANK")
    if local is not None:
        return local
    index = rank() if is_initialized() else env_int("RANK") or 0
    warnings.warn(
        f"distributed_run: LOCAL_RANK is not set on this launch, so the global rank {index} picks the CUDA device; "
        "launch with torchrun, or set LOCAL_RANK",
        stacklevel=5,
    )
    return index


def _init_group(device: torch.device, timeout: timedelta | None) -> None:
    try:
        if device.type == "cuda":
            dist.init_process_group("nccl", timeout=timeout, device_id=device)
        else:
            dist.init_process_group("gloo", timeout=timeout)
    except BaseException:
        if is_initialized():  # made, but a peer is missing: waiting for it in a barrier would only repeat the failure
            dist.destroy_process_group()
        raise


def _destroy_with_peers(watch: Watch | None, how: str) -> None:
    """Destroy the default group, if it is still there, once every rank has come this far."""
    if not is_initialized():
        return
    if watch is not None:
        watch.leaves(how)
    failure = None
    # nccl's destroy waits for the work in flight; gloo's returns while a peer still computes.
    if is_distributed_run() and "gloo" in (backend() or ""):
        try:
            barrier()
            if watch is not None:
                watch.stop()
                barrier()  # the process that serves the store must not end before every watch did
        except Exception as error:
            failure = f"{error}\n{watch.waited_in_vain()}" if watch is not None else str(error)
    dist.destroy_process_group()
    if failure is not None:
        warnings.warn(
            "distributed_run: not every rank reached the end of the run, the group was destroyed without them: "
            f"{failure}",
            stacklevel=4,
        )
