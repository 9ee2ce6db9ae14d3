"""``fxshard demo``: train a small language model sharded, and show that it is the same training as unsharded.

Without a launcher it starts the ranks itself: one per GPU over nccl, or two over gloo on the CPU. Under torchrun it
uses the ranks that it is given. Rank 0 then trains the same model in one process, and the two loss curves are compared.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from fxshard.demo_launch import RankFailed, launch
from fxshard.demo_report import complaints, curves_text, largest_difference, read_traffic, tolerance, traffic_text
from fxshard.demo_text import read_text
from fxshard.demo_train import Training, parameter_count, train_sharded, train_unsharded
from fxshard.distributed import DistributedState, broadcast_from, distributed_run, is_distributed_launch


@dataclass(frozen=True)
class Demo:
    """One run of the demo. ``dump``: a folder that holds no dump yet, for rank 0; other ranks need none."""

    training: Training
    codegen: str
    device: str
    dump: str
    text: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``fxshard demo``."""
    parser.add_argument("--ranks", type=_positive, help="ranks to start (default: the number of GPUs, or 2 on the CPU)")
    parser.add_argument("--steps", type=_positive, default=60, help="training steps (default: 60)")
    parser.add_argument(
        "--codegen",
        choices=("inductor", "eager"),
        help="what runs the rewritten graphs (default: inductor, or eager where the CPU has no C++ compiler for it)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where there is a GPU)")
    parser.add_argument(
        "--dtype",
        choices=("f32", "bf16"),
        default="f32",
        help="of full parameters and compute; bf16 still stores, reduces and optimizes in f32 (default: f32)",
    )
    parser.add_argument("--text", metavar="FILE", help="train on this file (default: Python's standard library)")
    parser.add_argument(
        "--dump", metavar="DIR", help="where plans, schedules and code of every stage go (default: a temporary folder)"
    )


def run(arguments: argparse.Namespace) -> int:
    """The demo with parsed options: 0 if both trainings agree and the model learned, else 1 with a sentence.

    In a launch of several ranks it is collective, and every rank returns the same.
    """
    try:
        demo = _demo_from(arguments)
        if is_distributed_launch():
            return run_rank(demo)
        ranks = arguments.ranks or (torch.cuda.device_count() if demo.device == "cuda" else 2)
        return launch(run_rank, ranks, demo)
    except (ValueError, OSError, RankFailed) as error:
        print(f"fxshard demo: {error}", file=sys.stderr)
        return 1


def _demo_from(arguments: argparse.Namespace) -> Demo:
    """Checked options. ``ValueError`` for what cannot be done here, ``OSError`` for a file or folder."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cuda" and gpus == 0:
        raise ValueError("--device cuda was asked for, but there is no GPU that this torch can use; try --device cpu")
    if arguments.ranks is not None and is_distributed_launch():
        raise ValueError("--ranks is for ranks that the demo starts, but this is a launch; leave it to the launcher")
    if device == "cuda" and (arguments.ranks or 1) > gpus:
        raise ValueError(f"--ranks {arguments.ranks} needs as many GPUs, and there are {gpus}; or try --device cpu")
    compiler = device == "cuda" or shutil.which(_cxx()) is not None
    if arguments.codegen == "inductor" and not compiler:
        raise ValueError(f"Inductor needs a C++ compiler, and {_cxx()!r} is none; name one in CXX, or --codegen eager")
    if arguments.text is not None:
        read_text(arguments.text)  # complain before any rank starts
    training = Training(steps=arguments.steps, bf16=arguments.dtype == "bf16")
    codegen = arguments.codegen or ("inductor" if compiler else "eager")
    dump = _dump_folder(arguments.dump) if os.environ.get("RANK", "0") == "0" else ""  # only rank 0 dumps
    return Demo(training, codegen, device, dump, arguments.text)


def _cxx() -> str:
    """The compiler that Inductor will call for CPU kernels."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def _dump_folder(asked: str | None) -> str:
    if asked is None:
        return tempfile.mkdtemp(prefix="fxshard-demo-")
    folder = Path(asked)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("graph*")):
        raise ValueError(f"--dump {asked} holds a dump already ({folder / 'graph0'}); name another folder or remove it")
    return str(folder.absolute())


def run_rank(demo: Demo) -> int:
    """One rank's part, collective over the ranks of the launch: 0 if the demo passes, else 1, on every rank."""
    if demo.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what defaults to a GPU where there is one is not wanted then
        torch.set_num_threads(1)
    os.environ["FXSHARD_DUMP"] = demo.dump
    with distributed_run(device=demo.device) as state:
        text = broadcast_from("demo text", lambda: read_text(demo.text))
        if state.is_main:
            print(_title(demo, state), flush=True)
        sharded = train_sharded(demo.training, text, state, demo.codegen)
        unsharded = broadcast_from("demo check", lambda: train_unsharded(demo.training, text, state).losses)
        if state.is_main:
            _print_report(demo, sharded.losses, unsharded, sharded.seconds)
        return 1 if complaints(sharded.losses, unsharded, demo.training.bf16) else 0


def _title(demo: Demo, state: DistributedState) -> str:
    training = demo.training
    ranks = "1 rank" if state.world_size == 1 else f"{state.world_size} ranks"
    return (
        f"{parameter_count(training.size) / 1e6:.1f} M parameters on {ranks} ({state.device.type}), "
        f"{'bf16' if training.bf16 else 'f32'}, codegen {demo.codegen}: {training.steps} steps of "
        f"{state.world_size * training.rows} × {training.size.context} bytes; the first step compiles"
    )


def _print_report(demo: Demo, sharded: list[float], unsharded: list[float], seconds: list[float]) -> None:
    bf16 = demo.training.bf16
    typical = sorted(seconds[1:] or seconds)[len(seconds[1:]) // 2]
    print(f"\n{curves_text(sharded, unsharded)}")
    print(f"largest difference {largest_difference(sharded, unsharded):.1e}, should be under {tolerance(bf16):.0e}\n")
    print(traffic_text(read_traffic(Path(demo.dump))))
    print(f"seconds                {seconds[0]:.1f} for the first step, {typical:.2f} for a later one")
    print(f"dump                   {demo.dump} (to read it: fxshard inspect {demo.dump})\n")
    wrong = complaints(sharded, unsharded, bf16)
    failed = "\n".join(f"FAILED: {sentence}" for sentence in wrong)
    print(failed or "PASSED: both trainings agree, and the model learned")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return number
