"""Ranks for tests: a pool of gloo workers, fresh processes without a group, and a fake world in this process.

Functions given to `RankPool.run` and `run_processes` are module-level functions of a test file. They are pickled by
name, so a worker imports the test file; it gets this process's `sys.path` with each job.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_HOST = "127.0.0.1"
_PRELOAD = ["torch.distributed", "torch._dynamo", "fxshard._inductor", "fxshard.backend"]
_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def _worker_env() -> dict[str, str | None]:
    """Environment of every child: one thread, no Inductor compile pool, no GPU, gloo on the loopback interface."""
    env: dict[str, str | None] = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env["CUDA_VISIBLE_DEVICES"] = ""  # torch would take the GPU for default meshes, which gloo ranks cannot share
    env["GLOO_SOCKET_IFNAME"] = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return env


def _apply(env: dict[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    merged = {**env, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _encode(value: Any) -> bytes:
    # By value: multiprocessing's own pickler would pass tensors as file descriptors that outlive neither side.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _decode(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _import_from(path: list[str]) -> None:
    sys.path.extend(entry for entry in path if entry not in sys.path)


def _dump_stacks_on_signal(file: str) -> None:
    """Write all Python stacks to `file` on SIGUSR1; works while the main thread waits in C."""
    faulthandler.register(signal.SIGUSR1, open(file, "w"), all_threads=True)  # noqa: SIM115 (open for process life)


def _stacks(pid: int, file: Path) -> str:
    """The Python stacks of the hung process `pid`, asked for and read now."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.3)
    return file.read_text() if file.exists() else ""


def reset_dynamo() -> None:
    """`torch._dynamo.reset()`, if anything has imported it."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


# --- the pool ----------------------------------------------------------------------------------------------------


@dataclass
class _Answer:
    ok: bool
    text: str  # "returned", or why there is no value
    value: Any = None


@dataclass
class _Worker:
    rank: int
    process: Any
    connection: Connection
    stacks: Path

    def receive(self) -> _Answer:
        try:
            return _decode(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(timeout=5)
            return _Answer(False, f"died with exit code {self.process.exitcode}")

    def hung(self, seconds: float) -> _Answer:
        return _Answer(False, f"no answer within {seconds:.1f} s; stacks:\n{_stacks(self.process.pid, self.stacks)}")


def _attempt(fn: Callable[[], Any]) -> bytes:
    try:
        return _encode(_Answer(True, "returned", fn()))
    except BaseException:  # SystemExit and KeyboardInterrupt of a test function must not end the worker
        return _encode(_Answer(False, traceback.format_exc()))


def _serve(
    rank: int,
    world_size: int,
    port: int,
    timeout: float,
    connection: Connection,
    stacks: str,
    environment: dict[str, str],
) -> None:
    """Main of a worker: set the group up, say so, then run jobs until the pipe closes."""
    os.environ.clear()  # the fork server's, from when it started
    os.environ.update(environment)
    _dump_stacks_on_signal(stacks)
    torch.set_num_threads(1)

    def init() -> None:
        store = dist.TCPStore(_HOST, port, is_master=False)
        # On a busy machine workers start seconds apart: the group's timeout must not count that.
        store.set(f"started {rank}", "")
        store.wait([f"started {peer}" for peer in range(world_size)])
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)

    connection.send_bytes(_attempt(init))

    def job(data: bytes) -> Any:
        path, call = pickle.loads(data)
        _import_from(path)
        fn, args = pickle.loads(call)
        return fn(*args)

    while True:
        try:
            data = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        answer = _attempt(lambda data=data: job(data))  # type: ignore[misc]
        reset_dynamo()
        connection.send_bytes(answer)


class RankPool:
    """`world_size` processes with one gloo default group, started at the first `run` and reused by later ones.

    They are forked from a server that has imported torch and fxshard and does nothing else.

    Each worker has one thread, no GPU and no launch environment (`WORLD_SIZE` and the like are unset). Any failed run
    tears the pool down, since a group that a peer left half way cannot be trusted; the next run starts a fresh one.

    group_timeout: seconds a collective waits for its peers. deadline: seconds `run` waits for all answers.
    """

    def __init__(self, world_size: int, *, group_timeout: float = 20.0, deadline: float = 120.0) -> None:
        self.world_size = world_size
        self.group_timeout = group_timeout
        self.deadline = deadline
        self._workers: list[_Worker] = []
        self._resources = contextlib.ExitStack()

    def run(self, fn: Callable[..., Any], *args: Any, deadline: float | None = None) -> list[Any]:
        """`fn(*args)` on every rank; the returned values in rank order, copied by `torch.save`.

        AssertionError with every rank's traceback, exit code or stacks if a rank raises, dies or misses the deadline.
        """
        call = pickle.dumps((fn, args))
        if not self._workers:
            self._start()
            self._collect("starting the pool", self.deadline)
        for worker in self._workers:
            with contextlib.suppress(OSError):  # a dead worker is reported by _collect
                worker.connection.send_bytes(pickle.dumps((sys.path, call)))
        name = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', fn)}"
        return self._collect(name, self.deadline if deadline is None else deadline)

    def close(self) -> None:
        """Kill the workers; a later `run` starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers = []
        self._resources.close()

    def _start(self) -> None:
        folder = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="fxshard-ranks-"))
        # The parent serves the store on a port that the system picks: no race for a free one.
        store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self._resources.callback(lambda store: None, store)
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        saved = dict(os.environ)
        environment = _apply(saved, {**dict.fromkeys(_LAUNCH), **_worker_env()})
        try:
            os.environ.clear()
            os.environ.update(environment)
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                stacks = Path(folder, f"rank{rank}.stacks")
                process = context.Process(
                    target=_serve,
                    args=(rank, self.world_size, store.port, self.group_timeout, theirs, str(stacks), environment),
                    name=f"rank {rank} of {self.world_size}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._workers.append(_Worker(rank, process, ours, stacks))
        finally:
            os.environ.clear()
            os.environ.update(saved)

    def _collect(self, name: str, seconds: float) -> list[Any]:
        """One answer of every worker, or AssertionError after a teardown."""
        answers: dict[int, _Answer] = {}
        began = time.monotonic()
        try:
            while len(answers) < self.world_size:
                pending = {w.connection: w for w in self._workers if w.rank not in answers}
                remaining = began + seconds - time.monotonic()
                ready = wait(list(pending), timeout=max(0.0, remaining))
                if not ready:
                    elapsed = time.monotonic() - began
                    answers.update({w.rank: w.hung(elapsed) for w in pending.values()})
                for connection in ready:
                    worker = pending[connection]  # type: ignore[index]
                    answers[worker.rank] = worker.receive()
                if any(not answer.ok for answer in answers.values()):
                    # Peers of a failed rank sit in a collective; they get the group's timeout to say where.
                    seconds = min(seconds, time.monotonic() - began + self.group_timeout + 5.0)
        except BaseException:
            self.close()
            raise
        failed = [rank for rank in range(self.world_size) if not answers[rank].ok]
        if failed:
            self.close()
            report = "\n".join(f"--- rank {rank}: {answers[rank].text.rstrip()}" for rank in range(self.world_size))
            raise AssertionError(f"{name}: rank {failed} of {self.world_size} ranks failed\n{report}")
        return [answers[rank].value for rank in range(self.world_size)]


# --- fresh processes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exit:
    """How one fresh process ended.

    code: exit code, negative for a signal. exception, message: type name and text of what left `fn`, None if it
    returned or the process left by `os._exit`. value: what `fn` returned. seconds: from the call of `fn` to the end of
    the process.
    """

    rank: int
    code: int
    exception: str | None
    message: str | None
    stdout: str
    stderr: str
    value: Any
    seconds: float


def _child(folder: str) -> None:
    """Main of a fresh process: run the job in `folder`, record how it ended, and end the same way."""
    rank, world_size = os.environ["FXSHARD_TEST_RANK"], int(os.environ["FXSHARD_TEST_WORLD_SIZE"])
    _dump_stacks_on_signal(str(Path(folder, f"{rank}.stacks")))
    torch.set_num_threads(1)
    path, call = pickle.loads(Path(folder, "job").read_bytes())
    _import_from(path)
    try:
        fn, args = pickle.loads(call)
    finally:
        Path(folder, f"{rank}.started").touch()
    # Imports take seconds, more on a busy machine: all children call `fn` together, so that its timing means something.
    while len(list(Path(folder).glob("*.started"))) < world_size:
        time.sleep(0.01)
    record: dict[str, Any] = {"began": time.monotonic()}
    result = Path(folder, f"{rank}.result")
    result.write_bytes(_encode(record))
    try:
        record["value"] = fn(*args)
    except BaseException as error:
        record.update(exception=type(error).__name__, message=str(error))
        raise
    finally:
        result.write_bytes(_encode(record))


def run_processes(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    env: Mapping[str, str | None] | None = None,
    deadline: float = 60.0,
) -> list[Exit]:
    """`fn(*args)` in `world_size` fresh processes without a process group; how each ended, in rank order.

    The environment is a launcher's (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`; the store is
    served by this process as `torchrun` does), without GPUs. `env` changes it for all of them; None removes a variable.
    They call `fn` together once all have started. Whatever a child does is a result; only one alive after `deadline`
    seconds is an AssertionError, with its stacks.
    """
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="fxshard-processes-") as folder:
        Path(folder, "job").write_bytes(pickle.dumps((sys.path, pickle.dumps((fn, args)))))
        children = [_spawn(rank, world_size, store.port, folder, env or {}) for rank in range(world_size)]
        try:
            ended = _wait_all(children, folder, deadline)
        finally:
            for child in children:
                child.kill()
                child.wait()
        return [_exit_of(rank, child, folder, ended[rank]) for rank, child in enumerate(children)]


def _spawn(
    rank: int, world_size: int, port: int, folder: str, env: Mapping[str, str | None]
) -> subprocess.Popen[bytes]:
    values = (str(rank), str(rank), str(world_size), _HOST, str(port), "True")
    launch = dict(zip(_LAUNCH, values, strict=True))
    own: dict[str, str | None] = {"FXSHARD_TEST_RANK": str(rank), "FXSHARD_TEST_WORLD_SIZE": str(world_size)}
    environment = _apply(dict(os.environ), {**_worker_env(), **launch, **own, **env})
    main = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import ranks; ranks._child({folder!r})"
    with Path(folder, f"{rank}.stdout").open("wb") as out, Path(folder, f"{rank}.stderr").open("wb") as err:
        return subprocess.Popen([sys.executable, "-c", main], env=environment, stdout=out, stderr=err)


def _wait_all(children: list[subprocess.Popen[bytes]], folder: str, deadline: float) -> dict[int, float]:
    """When each child ended (monotonic seconds); AssertionError if some are alive at the deadline."""
    ended: dict[int, float] = {}
    limit = time.monotonic() + deadline
    while len(ended) < len(children):
        for rank, child in enumerate(children):
            if rank not in ended and child.poll() is not None:
                ended[rank] = time.monotonic()
        if len(ended) < len(children) and time.monotonic() > limit:
            hung = [rank for rank in range(len(children)) if rank not in ended]
            stacks = {rank: _stacks(children[rank].pid, Path(folder, f"{rank}.stacks")) for rank in hung}
            report = "\n".join(
                f"--- rank {rank}: {stacks.get(rank, f'exit code {child.returncode}')}\n"
                + Path(folder, f"{rank}.stderr").read_text()
                for rank, child in enumerate(children)
            )
            raise AssertionError(f"rank {hung} of {len(children)} processes still alive after {deadline} s\n{report}")
        time.sleep(0.02)
    return ended


def _exit_of(rank: int, child: subprocess.Popen[bytes], folder: str, ended: float) -> Exit:
    result = Path(folder, f"{rank}.result")
    record: dict[str, Any] = _decode(result.read_bytes()) if result.exists() else {"began": ended}
    return Exit(
        rank=rank,
        code=child.returncode,
        exception=record.get("exception"),
        message=record.get("message"),
        stdout=Path(folder, f"{rank}.stdout").read_text(),
        stderr=Path(folder, f"{rank}.stderr").read_text(),
        value=record.get("value"),
        seconds=ended - record["began"],
    )


# --- a fake world ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """This process as one rank of `world_size` whose collectives move no data (torch's fake process group).

    For planning and tracing at any world size; the values that such collectives give are meaningless.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
