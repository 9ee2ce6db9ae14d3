"""Start the ranks of a run as processes of this machine, and end them all when one fails."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.multiprocessing as mp

T = TypeVar("T")
_HOST = "127.0.0.1"


class RankFailed(RuntimeError):
    """A rank raised, exited with another code than 0 or was killed; no rank is left running."""


def launch(fn: Callable[..., T], ranks: int, *args: Any) -> T:
    """What ``fn(*args)`` returns on rank 0, after it ran in ``ranks`` new processes in a launcher's environment.

    ``fn`` and ``args`` are pickled, so ``fn`` is a function of a module. Every rank sees the variables that torchrun
    sets (``RANK``, ``WORLD_SIZE``, ...) and makes its own process group. Raises ``RankFailed`` for the first rank that
    fails, and ``KeyboardInterrupt`` when one is interrupted. No rank outlives the call, however it ends, nor this
    process.
    """
    # Served from here, on a port that the system picks: a free port given to rank 0 could be taken meanwhile.
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="fxshard-launch-") as folder:
        result = Path(folder, "result")
        context = mp.start_processes(
            _rank_main,
            (ranks, store.port, str(result), fn, args),
            nprocs=ranks,
            join=False,
            daemon=True,
            start_method="spawn",
        )
        try:
            while not context.join():
                pass
        except mp.ProcessRaisedException as error:
            raise RankFailed(f"rank {error.error_index} of {ranks} failed: {error.msg.strip()}") from None
        except mp.ProcessExitedException as error:
            if error.signal_name == "SIGINT":  # Ctrl-C that reached a rank before it reached this process
                raise KeyboardInterrupt from None
            ended = error.signal_name or f"exit code {error.exit_code}"
            raise RankFailed(f"rank {error.error_index} of {ranks} ended with {ended}") from None
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return pickle.loads(result.read_bytes())


def _rank_main(rank: int, ranks: int, port: int, result: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # Ctrl-C reaches every process of the terminal: ranks end at once and in silence, the parent says what happened.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR=_HOST, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:  # gloo would look up this machine's own name, which may lead anywhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    value = fn(*args)
    if rank == 0:
        Path(result).write_bytes(pickle.dumps(value))
