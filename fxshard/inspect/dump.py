"""``FXSHARD_DUMP=dir``: every stage of every graph, its plan and schedule, and the generated code, as files.

One folder a captured graph (``graph0``, ``graph1``, ...), files numbered in the order of the pipeline, and an
``index.md`` that says what each is. Only rank 0 writes: the files are the same on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch import fx

from fxshard.inspect.copies import Copies
from fxshard.inspect.plan_text import plan_text
from fxshard.inspect.schedule import Step, schedule_text
from fxshard.plan import Plan


@dataclass
class Dump:
    """Where the files of one captured graph go; nowhere when ``folder`` is None."""

    folder: Path | None = None
    written: list[tuple[str, str]] = field(default_factory=list)

    @staticmethod
    def from_environment() -> Dump:
        """A new folder under ``$FXSHARD_DUMP`` for the next captured graph, on rank 0 when the variable is set."""
        root = os.environ.get("FXSHARD_DUMP")
        if not root or (dist.is_available() and dist.is_initialized() and dist.get_rank() != 0):
            return Dump()
        number = 0
        while (folder := Path(root) / f"graph{number}").exists():
            number += 1
        folder.mkdir(parents=True)
        return Dump(folder)

    def stage(self, kind: str, stage: str, gm: fx.GraphModule) -> None:
        """A graph after a stage of the pipeline, as readable code."""
        if self.folder is not None:
            self._write(f"{kind}-{stage}.py", gm.print_readable(print_output=False), f"{kind} graph after {stage}")

    def schedule(self, plan: Plan, steps: Sequence[Step], copies: Copies) -> None:
        """What was decided for a graph, the order that came of it, and what is copied."""
        if self.folder is not None:
            self._write(f"{plan.kind}-plan.json", plan.to_json(), f"{plan.kind} plan, to load and compare")
            self._write(f"{plan.kind}-plan.txt", plan_text(f"{plan.kind} plan", [plan]), f"{plan.kind} plan, to read")
            text = schedule_text(f"{plan.kind} schedule", [(plan, steps)]) + f"\n{copies}\n"
            self._write(f"{plan.kind}-schedule.txt", text, f"{plan.kind} launches, waits and compute in order")

    def code(self, kind: str, code: str | None) -> None:
        """The code that Inductor made of a graph."""
        if self.folder is not None and code is not None:
            self._write(f"{kind}-code.py", code, f"{kind} code as Inductor emitted it")

    def _write(self, name: str, text: str, what: str) -> None:
        assert self.folder is not None
        name = f"{len(self.written):02d}-{name}"
        (self.folder / name).write_text(text, encoding="utf-8")
        self.written.append((name, what))
        index = "\n".join(f"* [{n}]({n}): {w}" for n, w in self.written)
        (self.folder / "index.md").write_text(f"# One captured graph, stage by stage\n\n{index}\n", encoding="utf-8")
