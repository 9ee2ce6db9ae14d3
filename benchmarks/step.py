"""Time of a training step: fxshard against torch's FSDP2, eager and compiled block by block, in one interleaved run.

    python benchmarks/step.py                                      two gloo ranks on this machine
    torchrun --nproc-per-node 2 benchmarks/step.py --peers fxshard,fsdp2-compile

It starts two ranks, or uses those of the launch it is part of (``WORLD_SIZE`` > 1). In each round every peer trains a
few steps on the same batches, in turn, so that whatever else the machine does hits all of them. The losses must agree,
or the exit code is 1. What one process cannot tell apart for several peers (the first step with cold caches, peak
memory) is measured afterwards, one peer at a time in new ranks. See README.md for the columns.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from step_model import Llama, Size
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import fxshard
from fxshard.demo_launch import launch
from fxshard.distributed import all_reduce, barrier, distributed_run, is_distributed_launch

BATCHES = 4
"""Batches are used again and again: a model that memorises them has a loss that wrong gradients would change."""

TOLERANCE = 1e-4
"""The largest difference of two peers' losses, in nats; fp32."""

REFERENCE = "fsdp2-compile"


@dataclass(frozen=True)
class Settings:
    """One measurement, the same on every rank."""

    size: Size
    peers: tuple[str, ...]
    batch: int
    context: int
    rounds: int
    steps: int
    warmup: int
    optimizer: str
    cache: str  # where compilers keep what they made; "" for their default
    options: dict[str, Any] = field(default_factory=dict)


# ---- peers ---------------------------------------------------------------------------------------------------------


def build_fxshard(model: nn.Module, mesh: DeviceMesh, settings: Settings) -> nn.Module:
    return torch.compile(fxshard.shard(model, mesh), backend="fxshard", options=settings.options)  # type: ignore[return-value]


def build_fsdp2(model: Llama, mesh: DeviceMesh, settings: Settings) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def build_fsdp2_compile(model: Llama, mesh: DeviceMesh, settings: Settings) -> nn.Module:
    build_fsdp2(model, mesh, settings)
    for block in model.blocks:
        block.compile()
    return model


PEERS: dict[str, Callable[[Any, DeviceMesh, Settings], nn.Module]] = {
    "fxshard": build_fxshard,
    "fsdp2": build_fsdp2,
    "fsdp2-compile": build_fsdp2_compile,
}


class Training:
    """One peer, and of each step the loss, the seconds of its parts, and the CPU seconds of all threads."""

    PARTS = ("forward", "backward", "optimizer")

    def __init__(self, name: str, settings: Settings, mesh: DeviceMesh, rank: int) -> None:
        torch.manual_seed(0)
        self.model = PEERS[name](Llama(settings.size), mesh, settings)
        how = {} if settings.optimizer == "default" else {settings.optimizer: True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **how)
        self.batches = itertools.cycle(_batches(settings, rank))
        self.losses: list[float] = []
        self.seconds: list[tuple[float, ...]] = []
        self.cpu: list[float] = []

    def step(self) -> None:
        tokens, targets = next(self.batches)
        cpu, times = time.process_time(), [time.perf_counter()]
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(time.perf_counter())
        self.cpu.append(time.process_time() - cpu)
        self.losses.append(loss.item())
        self.seconds.append(tuple(after - before for before, after in itertools.pairwise(times)))


def _batches(settings: Settings, rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = settings.batch, settings.context + 1
    drawn = [torch.randint(settings.size.vocabulary, shape, generator=generator) for _ in range(BATCHES)]
    return [(d[:, :-1].contiguous(), d[:, 1:].contiguous()) for d in drawn]


# ---- what a rank does ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _run(settings: Settings) -> Iterator[tuple[DeviceMesh, int]]:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if settings.cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = settings.cache
    torch.set_num_threads(1)
    with distributed_run(device="cpu") as state:
        yield init_device_mesh("cpu", (state.world_size,)), state.rank


def interleaved(settings: Settings) -> dict[str, dict[str, Any]]:
    """Every peer in one process a rank, in turn. Collective; rank 0's numbers by peer."""
    with _run(settings) as (mesh, rank):
        peers = {name: Training(name, settings, mesh, rank) for name in settings.peers}
        for peer in peers.values():
            for _ in range(settings.warmup):
                peer.step()
        rounds: dict[str, list[list[tuple[float, ...]]]] = {name: [] for name in peers}
        names = list(peers)
        for number in range(settings.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                barrier()
                for _ in range(settings.steps):
                    peers[name].step()
                rounds[name].append(peers[name].seconds[-settings.steps :])
        return {
            name: {
                "losses": all_reduce("losses", lambda peer=peer: peer.losses, _mean_of_each),
                "rounds_ms": [1e3 * statistics.median(map(sum, seconds)) for seconds in rounds[name]],
                "cpu_ms": 1e3 * statistics.median(peer.cpu[settings.warmup :]),
                "parts_ms": _parts_ms(itertools.chain.from_iterable(rounds[name])),
                "collectives": count_collectives(peer.step),
            }
            for name, peer in peers.items()
        }


def _parts_ms(steps: Iterator[tuple[float, ...]]) -> dict[str, float]:
    return {part: 1e3 * statistics.median(s) for part, s in zip(Training.PARTS, zip(*steps, strict=True), strict=True)}


def _mean_of_each(ranks: list[list[float]]) -> list[float]:
    return [statistics.fmean(losses) for losses in zip(*ranks, strict=True)]


def count_collectives(step: Callable[[], None]) -> dict[str, int]:
    """Collectives that one step launches, by name, as torch's profiler sees them in this process."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step()
    # Every launch goes through one op of the namespace c10d, whoever asked for it.
    return dict(Counter(e.name.removeprefix("c10d::") for e in trace.events() or [] if e.name.startswith("c10d::")))


def alone(settings: Settings) -> dict[str, Any]:
    """The only peer in its own processes: its first step, and peak memory. Collective; the largest of all ranks."""
    with _run(settings) as (mesh, rank):
        peer = Training(settings.peers[0], settings, mesh, rank)
        mine: dict[str, float] = {"before_mib": _peak_mib()}
        peer.step()
        mine["first_step_s"] = sum(peer.seconds[0])
        for _ in range(settings.steps):
            peer.step()
        mine["peak_mib"] = _peak_mib()
        return all_reduce("alone", lambda: mine, lambda ranks: {key: max(r[key] for r in ranks) for key in mine})


def _peak_mib() -> float:
    """The most memory that this process ever had resident, compilers included that run inside it."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


# ---- the whole measurement -----------------------------------------------------------------------------------------


def main() -> int:
    """Measure, print the table, and say whether the peers trained the same model: 0, or 1 if they did not."""
    arguments = _arguments()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the ranks' profilers would write to stderr
    settings = Settings(
        size=Size(arguments.layers, arguments.width, arguments.hidden, arguments.heads, arguments.vocabulary),
        peers=tuple(arguments.peers),
        batch=arguments.batch,
        context=arguments.context,
        rounds=arguments.rounds,
        steps=arguments.steps,
        warmup=arguments.warmup,
        optimizer=arguments.optimizer,
        cache="",
        options=json.loads(arguments.options),
    )
    if is_distributed_launch():
        measured = interleaved(settings)
        if os.environ["RANK"] != "0":
            return 0
    else:
        measured = launch(interleaved, arguments.ranks, settings)
        for name in settings.peers if arguments.alone else ():
            with tempfile.TemporaryDirectory(prefix="fxshard-bench-") as cache:
                measured[name] |= launch(alone, arguments.ranks, replace(settings, peers=(name,), cache=cache))
    _add_ratios(measured)
    print(_table(measured))
    wrong = _disagreements({name: peer["losses"] for name, peer in measured.items()})
    for sentence in wrong:
        print(f"FAILED: {sentence}", file=sys.stderr)
    if arguments.json:
        report = {"torch": torch.__version__, "settings": asdict(settings), "peers": measured, "failed": wrong}
        Path(arguments.json).write_text(json.dumps(report, indent=1))
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of a training step: fxshard against torch's FSDP2.")
    parser.add_argument("--peers", type=_peers, default=list(PEERS), help=f"of {','.join(PEERS)} (default: all)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start where there is no launch (default: 2)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="of each peer and round")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each peer before the first round")
    parser.add_argument("--batch", type=int, default=4, help="rows of each rank")
    parser.add_argument("--context", type=int, default=64, help="tokens of a row")
    for name, value in asdict(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--optimizer", choices=("default", "foreach", "fused"), default="default", help="form of AdamW")
    parser.add_argument("--options", default="{}", help="of the fxshard backend, as JSON")
    parser.add_argument("--alone", action=argparse.BooleanOptionalAction, default=True, help="also first step, memory")
    parser.add_argument("--json", metavar="FILE", help="write every number there")
    return parser.parse_args()


def _peers(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"unknown peers {unknown}; choose from {', '.join(PEERS)}")
    return names


def _add_ratios(measured: dict[str, dict[str, Any]]) -> None:
    """Step time over all rounds, and its ratio to the reference's of the same round, the median of both."""
    for peer in measured.values():
        peer["step_ms"] = statistics.median(peer["rounds_ms"])
        if REFERENCE in measured:
            pairs = zip(peer["rounds_ms"], measured[REFERENCE]["rounds_ms"], strict=True)
            peer["ratio"] = statistics.median(own / reference for own, reference in pairs)


def _table(measured: dict[str, dict[str, Any]]) -> str:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "step ms": lambda peer: f"{peer['step_ms']:.1f}",
        f"÷ {REFERENCE}": lambda peer: f"{peer['ratio']:.2f}" if "ratio" in peer else "-",
        "cpu ms": lambda peer: f"{peer['cpu_ms']:.1f}",
        **{f"{part} ms": lambda peer, part=part: f"{peer['parts_ms'][part]:.1f}" for part in Training.PARTS},
        "collectives": lambda peer: str(sum(peer["collectives"].values())),
        "first step s": lambda peer: _number(peer, "first_step_s"),
        "peak MiB": lambda peer: _number(peer, "peak_mib"),
        "before MiB": lambda peer: _number(peer, "before_mib"),
    }
    rows = [["", *columns], *([name, *(cell(peer) for cell in columns.values())] for name, peer in measured.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _number(peer: dict[str, Any], key: str) -> str:
    return f"{peer[key]:.1f}" if key in peer else "-"


def _disagreements(losses: dict[str, list[float]]) -> list[str]:
    """A sentence for every peer whose losses are not those of the first one, or did not fall."""
    first, *_ = losses
    found = []
    for name, own in losses.items():
        difference = max((abs(a - b) for a, b in zip(own, losses[first], strict=True)), key=_nan_is_worst)
        if not difference < TOLERANCE:
            found.append(f"losses of {name} and {first} differ by {difference:.1e}, more than {TOLERANCE:.0e}")
        if not own[-1] < own[0]:
            found.append(f"{name} does not learn: its first loss is {own[0]:.4f}, its last one {own[-1]:.4f}")
    return found


def _nan_is_worst(difference: float) -> float:
    return difference if difference == difference else float("inf")


if __name__ == "__main__":
    sys.exit(main())
