"""``FXSHARD_DUMP=dir``: every stage of every graph as numbered files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from fxshard.plan import Plan


@dataclass
class Dump:
    """Where stage files go; nowhere when ``folder`` is None."""

    folder: Path | None = None
    count: int = 0

    @staticmethod
    def from_environment() -> Dump:
        name = os.environ.get("FXSHARD_DUMP")
        return Dump(Path(name) if name else None)

    def graph(self, stage: str, gm: fx.GraphModule, plan: Plan | None = None) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        text = gm.print_readable(print_output=False)
        (self.folder / f"{self.count:02d}-{stage}.py").write_text(text)
        self.count += 1
