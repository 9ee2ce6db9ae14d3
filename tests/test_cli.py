"""The ``fxshard`` command: what it prints of layouts and dumps, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from models import GPT2, tokens

import fxshard
from fxshard.cli import main
from fxshard.layout_models import waste_table


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_world: Any) -> Callable[[str, int], Path]:
    """``dump(name, prefetch)``: the dump of one training step of a small model as one rank of 8."""

    def make(name: str, prefetch: int) -> Path:
        folder = tmp_path / name
        monkeypatch.setenv("FXSHARD_DUMP", str(folder))
        torch._dynamo.reset()
        with fake_world(8):
            model = fxshard.shard(GPT2(width=16, blocks=2, heads=2))
            step = torch.compile(model, backend="fxshard", options={"codegen": "eager", "prefetch": prefetch})
            step(tokens(1, 4, seed=0)).sum().backward()
        return folder

    return make


# ---- layout --------------------------------------------------------------------------------------------------------


def test_layout_prints_the_waste_of_the_documented_builder_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "--model", "GPT-2", "--ranks", "64", "--block-sizes", "1"]) == 0
    row = next(r for r in waste_table(["GPT-2"], [64], [1]) if r.unit == "block")
    assert row.documented is not None and row.documented > row.split
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("GPT-2 block"))
    assert line.split()[2:] == ["64", "1", f"{row.documented:.2%}", f"{row.compact:.2%}", f"{row.split:.2%}", "2"]


def test_layout_says_why_the_documented_builder_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "--model", "GPT-2", "--ranks", "8", "--block-sizes", "32"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("GPT-2 embedding"))
    assert "refused" in line and "multiple of 32 in wte" in line


@pytest.mark.parametrize(
    ("arguments", "names"),
    [(["--model", "GPT-9"], "GPT-9"), (["--ranks", "0"], "dp_size"), (["--ranks", "few"], "few")],
)
def test_layout_refuses_bad_arguments_by_name(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["layout", *arguments])
    except SystemExit as refused:
        code = refused.code  # type: ignore[assignment]
    assert code == 2
    assert names in capsys.readouterr().err


# ---- dumps ---------------------------------------------------------------------------------------------------------


def test_inspect_prints_plans_schedules_and_index_of_a_dump(
    dump: Callable[[str, int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dump("a", 1)
    assert main(["inspect", str(folder)]) == 0
    whole = capsys.readouterr().out
    texts = sorted((folder / "graph0").glob("*.txt"))
    assert {file.name.split("-", 1)[1] for file in texts} == {
        "forward-plan.txt", "forward-schedule.txt", "backward-plan.txt", "backward-schedule.txt",
    }  # fmt: skip
    assert all(file.read_text().rstrip() in whole for file in texts)
    assert (folder / "graph0" / "index.md").read_text() in whole
    assert main(["inspect", str(folder / "graph0")]) == 0
    assert capsys.readouterr().out == whole


def test_diff_of_equal_dumps_is_empty_and_exits_with_0(
    dump: Callable[[str, int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(dump("a", 1)), str(dump("b", 1))]) == 0
    assert capsys.readouterr().out == ""


def test_diff_of_other_prefetch_shows_the_moved_launches_and_exits_with_1(
    dump: Callable[[str, int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = dump("a", 1), dump("b", 0)
    assert main(["diff", str(a), str(b)]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert f"--- {a}/graph0/forward-schedule.txt" in shown and f"+++ {b}/graph0/forward-schedule.txt" in shown
    assert any(line.startswith("-") and "launch" in line and "blocks.1" in line for line in shown)


def test_diff_shows_a_file_that_only_one_dump_has(
    dump: Callable[[str, int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = dump("a", 1), dump("b", 1)
    (gone,) = (b / "graph0").glob("*-backward-schedule.txt")
    lines = gone.read_text().splitlines()
    gone.unlink()
    assert main(["diff", str(a), str(b)]) == 1
    removed = [line[1:] for line in capsys.readouterr().out.splitlines()[3:]]
    assert removed == lines


@pytest.mark.parametrize("arguments", [["inspect", "nothing"], ["diff", "nothing", "nothing"]])
def test_a_folder_without_a_dump_is_refused_by_name(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / a) for a in arguments[1:]]
    assert main([arguments[0], *paths]) == 2
    assert f"{tmp_path / 'nothing'} holds no dump" in capsys.readouterr().err


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_installed_command_is_main() -> None:
    (script,) = (e for e in entry_points(group="console_scripts") if e.name == "fxshard")
    assert script.load() is main


def test_the_module_runs_as_a_program_and_passes_its_exit_code_on(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "fxshard.cli", "inspect", str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "holds no dump" in ended.stderr
