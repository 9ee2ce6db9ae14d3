"""Look at what the backend does with a model, from Python: plans and schedules of every graph that it captures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxshard.capture import Capture
from fxshard.inspect.dump import Dump
from fxshard.inspect.plan_text import plan_text
from fxshard.inspect.schedule import schedule_text
from fxshard.options import parse_options


@dataclass
class Recorder:
    """A backend that does what ``backend="fxshard"`` does and keeps what was decided.

    ``recorder = Recorder({"codegen": "eager"}); torch.compile(model, backend=recorder)``. ``captures`` has one entry a
    captured graph, with ``plans`` and ``steps`` by kind of graph; backward's appear when backward is compiled.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    captures: list[Capture] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        capture = Capture(parse_options(self.options), Dump.from_environment())
        self.captures.append(capture)
        return capture.compile(gm, example_inputs)

    def plan_text(self, title: str) -> str:
        """Every captured graph's plan, as one text."""
        return plan_text(title, [plan for c in self.captures for plan in c.plans.values()])

    def schedule_text(self, title: str) -> str:
        """Every captured graph's schedule, as one text."""
        return schedule_text(title, [(c.plans[kind], c.steps[kind]) for c in self.captures for kind in c.plans])
