"""Fault runs: one rank of a short sharded training raises, exits, quits, dies, hangs or does something else at random.

    python tests/distributed/faults.py --runs 200 --seed 0

Each run must end on every rank within the timeout, with a message that says which rank it was and where. A run is drawn
from its seed alone, so ``--runs 1 --seed N`` repeats run N. Processes are forked from one that has imported everything.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import fault_paths  # noqa: F401

# isort: split

import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter

import fxshard
from fxshard.backend import fxshard as backend
from fxshard.distributed import distributed_run

FAULTS = ("raise", "exit", "quit", "die", "hang")
DIFFERENCES = ("branch", "shape")  # the rank's forward takes another branch, or its batch has another size
POINTS = ("start", "shard", "compile", "forward", "backward", "clip", "optimizer", "data", "save", "end")
FORMS = ("eager", "compiled")
STEPS = 3
TIMEOUT = 8.0  # seconds, of the process group: enough for a peer that compiles on a busy machine
LIMIT = 60.0  # seconds until a run counts as hanging
START = 120.0  # seconds that importing everything, once, may take on a busy machine
EXIT_CODE = 3


class Fault(Exception):
    """What a rank raises."""


@dataclass(frozen=True)
class Run:
    """Rank ``rank`` of ``world`` has a fault (or differs) by ``kind`` when it comes to ``point`` in step ``step``."""

    seed: int
    world: int
    form: str
    kind: str
    point: str
    rank: int
    step: int

    @staticmethod
    def of(seed: int) -> Run:
        rng = random.Random(seed)
        world, form = rng.choice((2, 3)), rng.choice(FORMS)
        kind = rng.choice(FAULTS + DIFFERENCES)
        point = rng.choice([p for p in POINTS if form == "compiled" or p != "compile"])
        point = "forward" if kind in DIFFERENCES else point
        step = 0 if point in ("start", "shard", "compile") else STEPS - 1 if point == "end" else rng.randrange(STEPS)
        return Run(seed, world, form, kind, point, rng.randrange(world), step)

    def __str__(self) -> str:
        where = f"{self.world} ranks  {self.form:<8}  rank {self.rank} {self.kind:<5} {self.point:<9} step {self.step}"
        return f"{self.seed:>5}  {where}"


# -- the training ------------------------------------------------------------------------------------------------------


class Trigger:
    """Has the fault of a run when its rank comes to the point and the step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.step = 0

    def __call__(self, point: str) -> None:
        run = self.run
        if run.kind in DIFFERENCES or not self.pulled(point):
            return
        if run.kind == "raise":
            raise Fault("poisoned sample")
        if run.kind == "exit":
            sys.exit(EXIT_CODE)
        if run.kind == "quit":
            os._exit(EXIT_CODE)
        if run.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        hang()


    def pulled(self, point: str) -> bool:
        return (point, self.step, dist.get_rank()) == (self.run.point, self.run.step, self.run.rank)

    def differs(self, kind: str) -> bool:
        """Whether this rank's forward differs in this way in this step."""
        return self.run.kind == kind and self.pulled("forward")


def hang() -> None:
    while True:
        time.sleep(1)


def here_op(trigger: Trigger) -> Callable[[Tensor], Tensor]:
    """An op that compilers do not look into: it hands a tensor on and pulls the trigger, forward and backward."""

    @torch.library.custom_op("faults::here", mutates_args=())
    def here(x: Tensor) -> Tensor:
        trigger("forward")
        return x.clone()

    @torch.library.custom_op("faults::here_backward", mutates_args=())
    def here_backward(grad: Tensor) -> Tensor:
        trigger("backward")
        return grad.clone()

    here.register_fake(torch.empty_like)
    here_backward.register_fake(torch.empty_like)
    here.register_autograd(lambda ctx, grad: here_backward(grad))
    return here


class Block(nn.Module):
    def __init__(self, here: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.way = 0
        self.here = here

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.ways[self.way](self.here(x)))


class Writer(FileSystemWriter):
    """Writes a checkpoint, and pulls the trigger when its rank is about to write."""

    def __init__(self, folder: str, trigger: Trigger) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=False)
        self.trigger = trigger

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        self.trigger("save")
        return super().write_data(*args, **kwargs)


def train(folder: str, run: Run, timeout: float) -> None:
    """A few steps, with the fault of ``run``; checkpoints go to ``folder``."""
    with distributed_run(timeout=timedelta(seconds=timeout), device="cpu"):
        trigger = Trigger(run)
        trigger("start")
        torch.manual_seed(0)
        here = here_op(trigger)
        model = nn.Sequential(*(Block(here) for _ in range(3)))
        blocks = list(model)
        for block in blocks:
            for way in block.ways:
                fxshard.fully_shard(way)
        fxshard.shard(model)
        trigger("shard")
        optimizer = torch.optim.AdamW(model.parameters())
        step: Callable[[Tensor], Tensor] = model
        if run.form == "compiled":

            def compiled(gm: Any, inputs: Sequence[Any]) -> Any:
                trigger("compile")
                return backend(gm, inputs, options={"codegen": "eager"})

            step = torch.compile(model, backend=compiled)
        for number in range(STEPS):
            trigger.step = number
            trigger("data")
            for block in blocks:
                block.way = int(trigger.differs("branch"))
            step(torch.randn(3 if trigger.differs("shape") else 4, 8)).sum().backward()
            trigger("clip")
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            trigger("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            dcp.save({"model": model.state_dict()}, storage_writer=Writer(f"{folder}/{number}", trigger))
        trigger("end")


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a process ended; ``code`` is None for one that had to be killed."""

    code: int | None
    text: str
    seconds: float


def _child(folder: str, rank: int, world: int, port: int, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Main of one rank."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{rank}.{name}", os.O_CREAT | os.O_WRONLY), number)
    ranks._dump_stacks_on_signal(f"{folder}/{rank}.stacks")
    torch.set_num_threads(1)
    values = (str(rank), str(rank), str(world), "127.0.0.1", str(port), "True")
    os.environ.update({k: v for k, v in ranks._worker_env().items() if v is not None})
    os.environ.update(zip(ranks._LAUNCH, values, strict=True))
    Path(folder, f"{rank}.started").touch()
    _until(lambda: len(list(Path(folder).glob("*.started"))) == world, START)  # so that timeouts mean something
    fn(folder, *args)


def _until(done: Callable[[], bool], seconds: float) -> None:
    """Return when ``done()``, or after so many seconds."""
    limit = time.monotonic() + seconds
    while not done() and time.monotonic() < limit:
        time.sleep(0.02)


def execute(world: int, fn: Callable[..., None], *args: Any) -> list[Ended]:
    """``fn(folder, *args)`` on ranks forked from a process that has imported torch; how each ended, in rank order."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="fxshard-faults-") as folder:
        mains = [(folder, rank, world, store.port, fn, args) for rank in range(world)]
        processes = [_context().Process(target=_child, args=main) for main in mains]
        for process in processes:
            process.start()
        _until(lambda: len(list(Path(folder).glob("*.started"))) == world, START)
        began = time.monotonic()
        ended: dict[int, float] = {}

        def all_ended() -> bool:
            alive = {rank for rank, process in enumerate(processes) if process.is_alive()}
            ended.update({r: time.monotonic() - began for r in range(world) if r not in alive and r not in ended})
            return not alive

        _until(all_ended, LIMIT)
        outcomes = []
        for rank, process in enumerate(processes):
            text = Path(folder, f"{rank}.err").read_text(errors="replace")
            if rank not in ended:
                text += ranks._stacks(process.pid or 0, Path(folder, f"{rank}.stacks"))
                process.kill()
            process.join()
            code = process.exitcode if rank in ended else None
            outcomes.append(Ended(code, text, ended.get(rank, LIMIT)))
        return outcomes


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults", "fxshard.backend", "torch._inductor.compile_fx", "torch._dynamo"])
    return context


# -- what must come of it ----------------------------------------------------------------------------------------------


def problems(run: Run, ended: Sequence[Ended]) -> list[str]:
    """What is wrong with how the ranks of a run ended: nothing, if all is as it should be."""
    found = [f"rank {r} was alive after {LIMIT:.0f} s" for r, e in enumerate(ended) if e.code is None]
    if found:
        return found
    if run.kind == "shape" or (run.kind == "branch" and run.form == "eager"):  # all is as it should be
        return [f"rank {r} ended with {e.code}: {e.text}" for r, e in enumerate(ended) if (e.code, e.text) != (0, "")]
    own, others = ended[run.rank], [(r, e) for r, e in enumerate(ended) if r != run.rank]
    code, said = _expected_of_faulty(run)
    if own.code not in code:
        found.append(f"rank {run.rank} ended with {own.code}, not one of {code}")
    if said not in own.text:
        found.append(f"rank {run.rank} does not say {said!r}")
    told = _told_by_others(run)
    for rank, each in others:
        if each.code != (0 if run.point == "end" else 1):  # at the end they have done their part, and only warn
            found.append(f"rank {rank} ended with {each.code}")
        if told not in each.text:
            found.append(f"rank {rank} does not say {told!r}")
    return found


# Where each rank compiles they differ, and where one alone compiles the others do not come.
_BRANCH = {True: "compiled another schedule of collectives", False: "schedule of collectives that is new to the run"}


def _expected_of_faulty(run: Run) -> tuple[tuple[int, ...], str]:
    """Exit codes that the rank with the fault may have, and what it says."""
    collected = run.point == "save"  # what goes wrong in a save on any rank is raised on all of them by torch
    if run.kind == "raise":
        return (1,), "poisoned sample"
    if run.kind == "branch":
        return (1,), _BRANCH[run.step == 0]
    if run.kind == "exit":
        return ((1,), "SystemExit") if collected else ((EXIT_CODE,), "")
    if run.kind == "quit":
        return (EXIT_CODE,), ""
    if run.kind == "die":
        return (-signal.SIGKILL,), ""
    return (1,), "in hang"


def _told_by_others(run: Run) -> str:
    """What every other rank must say."""
    if run.point == "save" and run.kind in ("raise", "exit"):
        return "in write_data"
    if run.kind == "raise":
        return f"rank {run.rank} failed first, at distributed/faults.py"
    if run.kind == "exit":
        return "" if run.point == "end" else f"rank {run.rank} left the run by SystemExit({EXIT_CODE})"
    if run.kind == "branch":
        return _BRANCH[run.step == 0]
    if run.kind == "hang":
        return f"rank {run.rank} is alive, at distributed/faults.py"
    return f"rank {run.rank} gives no answer within 2 s"


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs in which a rank fails; all ranks must end, and say why.")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--verbose", action="store_true", help="what the ranks of a bad run wrote")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        run = Run.of(seed)
        ended = execute(run.world, train, run, TIMEOUT)
        wrong = problems(run, ended)
        counts["hangs"] += any(e.code is None for e in ended)
        counts["bad"] += bool(wrong)
        print(f"{run}  {max(e.seconds for e in ended):5.1f} s  {'; '.join(wrong) or 'ok'}", flush=True)
        if wrong and arguments.verbose:
            for rank, each in enumerate(ended):
                print(f"--- rank {rank}, {each.code}, {each.seconds:.1f} s\n{each.text}", flush=True)
    wrong_ends = counts["bad"] - counts["hangs"]
    print(f"{arguments.runs} runs, {counts['hangs']} hangs, {wrong_ends} that ended otherwise than they should")
    return 1 if counts["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
