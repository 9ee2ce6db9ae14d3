"""Golden files: text of ours under golden_graphs/, compared exactly, rewritten only on request and never in CI."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "golden_graphs"


class Golden:
    """Compares texts with files and remembers which files were asked for."""

    def __init__(self, folder: Path = FOLDER, accept: bool | None = None, ci: bool | None = None) -> None:
        self.folder = folder
        wants = any(os.environ.get(v) == "1" for v in ("FXSHARD_ACCEPT", "EXPECTTEST_ACCEPT"))
        self.accept = wants if accept is None else accept
        self.ci = bool(os.environ.get("CI")) if ci is None else ci
        self.asked: set[str] = set()

    def check(self, name: str, text: str) -> None:
        """Fail with a diff, what it means in one sentence, and the command to accept, unless ``text`` is the file's."""
        self.asked.add(name)
        path = self.folder / name
        before = path.read_text(encoding="utf-8") if path.exists() else None
        if before == text:
            return
        if self.accept:
            if self.ci:
                raise AssertionError(f"golden {name} differs and CI never rewrites goldens; run the test locally")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        accept = "FXSHARD_ACCEPT=1 python -m pytest tests/golden -k '" + name.split(".")[0] + "'"
        if before is None:
            raise AssertionError(f"golden {name} is missing. Read the text, then accept it with\n  {accept}\n\n{text}")
        diff = "".join(difflib.unified_diff(before.splitlines(True), text.splitlines(True), name, "now", n=2))
        raise AssertionError(f"golden {name} differs: {meaning(before, text)}. Accept with\n  {accept}\n\n{diff}")

    def orphans(self) -> list[str]:
        """Files that no test asked for."""
        there = {str(p.relative_to(self.folder)) for p in self.folder.rglob("*.txt")}
        return sorted(there - self.asked)


def meaning(before: str, after: str) -> str:
    """One sentence on what changed between two plans or schedules."""

    def collectives(text: str) -> list[str]:
        return [" ".join(line.split()[1:4]) for line in text.splitlines() if line.lstrip().startswith("t")]

    old, new = collectives(before), collectives(after)
    if sorted(old) != sorted(new):
        gone, come = [c for c in old if c not in new], [c for c in new if c not in old]
        went, came = ", ".join(gone[:3]) or "-", ", ".join(come[:3]) or "-"
        return f"{len(gone)} launches or waits went ({went}), {len(come)} came ({came})"
    if old != new:
        moved = next(a for a, b in zip(old, new, strict=True) if a != b)
        return f"the order of launches and waits changed, first at {moved}"
    changed = sum(a != b for a, b in zip(before.splitlines(), after.splitlines(), strict=False))
    return f"the order of collectives is the same, {changed} lines of sizes, layouts or kernel counts differ"
