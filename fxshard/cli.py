"""The ``fxshard`` command: ``demo``, ``layout``, ``inspect`` and ``diff``. Also ``python -m fxshard.cli``."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from fxshard import demo
from fxshard.layout_models import MODELS, waste_table


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or 1 where the answer is no, 2 for bad arguments, 130 for Ctrl-C."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print(f"fxshard {arguments.command}: interrupted, nothing is left running", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    about = "Sharded data-parallel training through torch.compile."
    parser = argparse.ArgumentParser(prog="fxshard", description=about)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("demo", help="train a small model sharded, and check it against unsharded training")
    demo.add_arguments(command)
    command.set_defaults(run=demo.run)

    command = commands.add_parser("layout", help="how much of each bucket well-known models waste, by layout")
    command.add_argument("--model", choices=("all", *MODELS), default="all")
    command.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 1024])
    command.add_argument("--block-sizes", type=int, nargs="+", default=[1, 32, 128], help="rows that stay together")
    command.set_defaults(run=_layout)

    command = commands.add_parser("inspect", help="print the plans and schedules of a dump")
    command.add_argument("folder", type=Path, help="what FXSHARD_DUMP named")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("diff", help="compare the plans and schedules of two dumps; exit 1 if they differ")
    command.add_argument("before", type=Path)
    command.add_argument("after", type=Path)
    command.set_defaults(run=_diff)
    return parser


# ---- layout --------------------------------------------------------------------------------------------------------


def _layout(arguments: argparse.Namespace) -> int:
    models = list(MODELS) if arguments.model == "all" else [arguments.model]
    try:
        rows = waste_table(models, arguments.ranks, arguments.block_sizes)
    except ValueError as error:
        print(f"fxshard layout: {error}", file=sys.stderr)
        return 2
    width = max(len(f"{row.model} {row.unit}") for row in rows)
    print("waste: elements of a bucket's buffer that no parameter uses, as a part of those used")
    print("rows: how many stay together; split: by row size, into as many buckets as the last column says\n")
    print(_waste_line("unit", width, "ranks", "rows", "documented", "one bucket", "split", "buckets"))
    for row in rows:
        documented = "refused" if row.documented is None else f"{row.documented:.2%}"
        ours = f"{row.compact:.2%}", f"{row.split:.2%}", str(row.buckets), row.note
        print(_waste_line(f"{row.model} {row.unit}", width, str(row.ranks), str(row.block_size), documented, *ours))
        if row.reason:
            print(f"  {row.reason}")
    return 0


def _waste_line(
    unit: str, width: int, ranks: str, rows: str, documented: str, whole: str, split: str, buckets: str, note: str = ""
) -> str:
    columns = f"{unit:<{width}}  {ranks:>5}  {rows:>4}  {documented:>10}  {whole:>10}  {split:>8}  {buckets:>7}"
    return f"{columns}  {note}".rstrip()


# ---- dumps ---------------------------------------------------------------------------------------------------------


def _inspect(arguments: argparse.Namespace) -> int:
    graphs = _graph_folders(arguments.folder)
    if not graphs:
        return _no_dump("inspect", arguments.folder)
    for graph in graphs:
        print(f"==== {graph}")
        for file in sorted(graph.glob("*.txt")):
            print(f"\n{file.read_text(encoding='utf-8').rstrip()}")
        print(f"\n{(graph / 'index.md').read_text(encoding='utf-8')}")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    texts = []
    for folder in (arguments.before, arguments.after):
        if not _graph_folders(folder):
            return _no_dump("diff", folder)
        texts.append(_texts(folder))
    before, after = texts
    different = False
    for name in sorted({*before, *after}):
        old, new = (text.get(name, "").splitlines() for text in (before, after))
        sides = f"{arguments.before}/{name}", f"{arguments.after}/{name}"
        for line in difflib.unified_diff(old, new, *sides, lineterm=""):
            different = True
            print(line)
    return 1 if different else 0


def _graph_folders(folder: Path) -> list[Path]:
    """The folders of the captured graphs of a dump, or the folder itself if it is one of those, in order."""
    if (folder / "index.md").exists():
        return [folder]
    found = [index.parent for index in folder.glob("graph*/index.md")]
    return sorted(found, key=lambda graph: (len(graph.name), graph.name))


def _texts(folder: Path) -> dict[str, str]:
    """Plans and schedules of a dump, by graph and name; without the number of the stage, which counts other files."""
    return {
        str(file.parent.relative_to(folder) / file.name.split("-", 1)[1]): file.read_text(encoding="utf-8")
        for graph in _graph_folders(folder)
        for file in sorted(graph.glob("*.txt"))
    }


def _no_dump(command: str, folder: Path) -> int:
    advice = f"make one by running with FXSHARD_DUMP={folder}"
    print(f"fxshard {command}: {folder} holds no dump (no graph0/index.md); {advice}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
