"""``fxshard demo``: its text, its ranks, what it reads from the dump, its verdict, and whole runs of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from models import GPT2, tokens
from ranks import run_processes

import fxshard
from fxshard import demo
from fxshard.cli import main
from fxshard.demo import Demo, run_rank
from fxshard.demo_launch import RankFailed, launch
from fxshard.demo_model import ByteTransformer, Size
from fxshard.demo_report import complaints, curves_text, read_steps, read_traffic, tolerance, traffic_text
from fxshard.demo_text import batches, read_text
from fxshard.demo_train import Training, parameter_count
from fxshard.inspect.schedule import hidden_launches

SMALL = Size(width=32, layers=2, heads=2, context=32)


# ---- text ----------------------------------------------------------------------------------------------------------


def test_the_default_text_is_python_source() -> None:
    text = read_text()
    assert len(text) > 1_000_000
    assert text.count(b"\ndef ") > 1000


def test_a_file_can_be_the_text(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"\x00\xff any bytes")
    assert read_text(str(file)) == b"\x00\xff any bytes"


def test_batches_are_equal_on_every_rank_and_targets_are_the_bytes_that_follow() -> None:
    text = bytes(range(100))
    first, again = (list(islice(batches(text, rows=3, context=8, seed=5), 4)) for _ in range(2))
    for (inputs, targets), (same_inputs, same_targets) in zip(first, again, strict=True):
        assert torch.equal(inputs, same_inputs) and torch.equal(targets, same_targets)
        assert inputs.shape == targets.shape == (3, 8)
        assert torch.equal(targets, inputs + 1)  # in this text
    assert not torch.equal(first[0][0], first[1][0])


@pytest.mark.parametrize(("length", "enough"), [(9, False), (10, True)])
def test_a_text_must_be_longer_than_a_row(length: int, enough: bool) -> None:
    drawn = batches(bytes(length), rows=1, context=8, seed=0)
    if enough:
        next(drawn)
        return
    with pytest.raises(ValueError, match=r"the text has 9 bytes, but a row takes 9"):
        next(drawn)


# ---- model ---------------------------------------------------------------------------------------------------------


def test_the_model_has_about_five_million_parameters_in_units_of_one_block() -> None:
    assert 4.5e6 < parameter_count(Size()) < 5.5e6
    model = fxshard.shard(ByteTransformer(SMALL))
    names = {module._fxshard_unit.name for module in model.modules() if getattr(module, "_fxshard_unit", None)}
    assert names == {"tokens+positions", "blocks.0", "blocks.1", "norm+head", "root"}


# ---- communication, from the dump ----------------------------------------------------------------------------------


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_world: Any) -> Path:
    """The dump of one training step of a model with two blocks, as one rank of 4."""
    monkeypatch.setenv("FXSHARD_DUMP", str(tmp_path))
    with fake_world(4):
        model = fxshard.shard(GPT2(width=16, blocks=2, heads=2))
        step = torch.compile(model, backend="fxshard", options={"codegen": "eager"})
        step(tokens(1, 4, seed=0)).sum().backward()
    return tmp_path


def test_traffic_counts_the_collectives_and_bytes_of_forward_and_backward(dump: Path) -> None:
    traffic = read_traffic(dump)
    # Units: embeddings, two blocks, norm and head. Backward needs no embedding, and has one reduction for each.
    assert (traffic.gathers, traffic.reductions) == (4 + 3, 4)
    # Forward reads each parameter once and backward reduces each once; backward reads those that are no bias again.
    parameters = [p for p, _ in GPT2(width=16, blocks=2, heads=2).named_parameters()]
    again = [p for p in parameters if not p.endswith("bias") and not p.startswith(("wte", "wpe"))]
    assert traffic.per_parameter == 2 * len(parameters) + len(again)
    size = 4 * sum(p.numel() for p in GPT2(width=16, blocks=2, heads=2).parameters())
    sent = size * 3 // 4  # of a buffer, by each of 4 ranks in a ring
    assert 2.5 * sent < traffic.sent < 3.5 * sent
    assert f"{traffic.sent:,} by each rank" in traffic_text(traffic)


def test_only_the_first_gather_and_the_last_reduction_have_nothing_to_hide_behind(dump: Path) -> None:
    traffic = read_traffic(dump)
    assert traffic.exposed == ("forward all_gather wte+wpe", "backward reduce_scatter wte+wpe")
    assert traffic.hidden == traffic.gathers + traffic.reductions - 2


def test_a_schedule_that_is_read_back_hides_as_many_launches_as_the_graph(dump: Path) -> None:
    for kind, expected in (("forward", (3, 4)), ("backward", (6, 7))):
        (file,) = dump.glob(f"graph0/*-{kind}-schedule.txt")
        assert hidden_launches(read_steps(file.read_text())) == expected


def test_without_a_dump_there_is_no_traffic_to_report(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing was compiled"):
        read_traffic(tmp_path)


# ---- verdict -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True])
def test_curves_that_differ_by_the_tolerance_fail_and_by_less_pass(bf16: bool) -> None:
    falling = [4.0, 2.0, 1.0]
    allowed = tolerance(bf16)
    assert complaints(falling, [4.0, 2.0 + 0.9 * allowed, 1.0], bf16) == []
    (sentence,) = complaints(falling, [4.0, 2.0 + 1.1 * allowed, 1.0], bf16)
    assert "differ" in sentence and f"{1.1 * allowed:.1e}" in sentence


def test_a_loss_that_is_no_number_fails() -> None:
    assert "nan" in complaints([4.0, float("nan"), 1.0], [4.0, 2.0, 1.0], bf16=False)[0]


@pytest.mark.parametrize(("last", "learned"), [(2.9, True), (3.0, False), (float("nan"), False)])
def test_the_last_loss_must_be_well_under_the_first(last: float, learned: bool) -> None:
    found = complaints([4.0, last], [4.0, last], bf16=False)
    assert any("did not learn" in sentence for sentence in found) is not learned


def test_both_curves_are_shown_from_the_first_to_the_last_step() -> None:
    sharded, unsharded = [5 - 0.1 * i for i in range(20)], [5 - 0.1 * i + 1e-5 for i in range(20)]
    lines = curves_text(sharded, unsharded, rows=3).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["1", "5.00000", "5.00001", "1.0e-05"],
        ["11", "4.00000", "4.00001", "1.0e-05"],
        ["20", "3.10000", "3.10001", "1.0e-05"],
    ]
    assert len(curves_text([1.0], [1.0]).splitlines()) == 2


# ---- ranks ---------------------------------------------------------------------------------------------------------


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}


def _rank_1_raises() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no such luck")
    time.sleep(600)


def _rank_1_is_killed() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_launch_gives_each_rank_its_environment_and_returns_what_rank_0_does() -> None:
    expected = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    assert launch(_environment, 2) == expected


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (_rank_1_raises, r"(?s)rank 1 of 2 failed.*ValueError: no such luck"),
        (_rank_1_is_killed, r"rank 1 of 2 ended with SIGKILL"),
    ],
)
def test_a_failing_rank_ends_the_others_and_is_named(fn: Any, said: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=said):
        launch(fn, 2)
    assert time.monotonic() - began < 120


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="counts processes as Linux shows them")
def test_ctrl_c_ends_every_rank_with_a_message_and_code_130(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "fxshard.cli", "demo", "--device", "cpu", "--codegen", "eager"]
    child = subprocess.Popen(
        [*program, "--dump", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert "M parameters on 2 ranks (cpu)" in child.stdout.readline()  # both ranks are in the run now
        os.killpg(child.pid, signal.SIGINT)  # what a terminal does
        _, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130
    assert "fxshard demo: interrupted, nothing is left running" in errors
    assert "Traceback" not in errors
    deadline = time.monotonic() + 30
    while running := _running_in_group(child.pid):  # helpers of multiprocessing end a little later
        assert time.monotonic() < deadline, running
        time.sleep(0.1)


def _running_in_group(group: int) -> list[str]:
    """The processes of a group that are not over, as ``/proc`` describes them."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            stat = file.read_text()
            state, _, pgid, *_ = stat.rpartition(")")[2].split()
            if int(pgid) == group and state != "Z":
                found.append(stat)
    return found


# ---- whole runs ----------------------------------------------------------------------------------------------------


def _small(dump: Path, codegen: str, bf16: bool = False) -> Demo:
    training = Training(steps=16, rows=2, learning_rate=1e-2, bf16=bf16, size=SMALL)
    return Demo(training, codegen, "cpu", str(dump))


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_small_demo_passes_and_reports(bf16: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(run_rank, 2, _small(tmp_path, "eager", bf16)) == 0
    printed = capfd.readouterr().out
    assert "PASSED" in printed and "FAILED" not in printed
    traffic = read_traffic(tmp_path)
    assert traffic_text(traffic) in printed
    assert (traffic.gathers, traffic.reductions, len(traffic.exposed)) == (7, 4, 2)


@pytest.mark.slow
def test_a_small_demo_passes_through_inductor_on_three_ranks(tmp_path: Path) -> None:
    assert launch(run_rank, 3, _small(tmp_path, "inductor")) == 0


def _demo_command(*arguments: str) -> int:
    demo.Training = partial(Training, size=SMALL)  # type: ignore[misc, assignment]  # in a process of its own
    return main(["demo", "--device", "cpu", "--codegen", "eager", "--steps", "1", *arguments])


def test_in_a_launch_the_demo_uses_its_ranks_and_fails_on_each_if_nothing_is_learned(tmp_path: Path) -> None:
    ended = run_processes(_demo_command, 2, "--dump", str(tmp_path), deadline=240)
    assert [rank.value for rank in ended] == [1, 1]
    assert "on 2 ranks (cpu)" in ended[0].stdout
    assert "FAILED: the model did not learn: its last loss is" in ended[0].stdout
    assert ended[1].stdout == ""
    assert (tmp_path / "graph0" / "index.md").exists()


# ---- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--text", "/no/such/file"], {}, "/no/such/file"),
        (["--device", "cpu", "--codegen", "inductor"], {"CXX": "no-such-compiler"}, "'no-such-compiler'"),
        (["--ranks", "3"], {"WORLD_SIZE": "2"}, "--ranks is for ranks that the demo starts"),
    ],
)
def test_what_cannot_work_is_refused_before_any_rank_starts(
    arguments: list[str],
    environment: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["demo", *arguments]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cuda"]) == 1
    assert "there is no GPU" in capsys.readouterr().err


def test_a_folder_that_holds_a_dump_already_is_refused(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cpu", "--codegen", "eager", "--dump", str(dump)]) == 1
    assert "holds a dump already" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--ranks", "-1"], ["--dtype", "f16"]])
def test_bad_numbers_and_names_are_usage_errors(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["demo", *arguments])
    assert refused.value.code == 2
