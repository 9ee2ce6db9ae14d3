"""``torch.compile(model, backend="fxshard")``: found through the entry-point group ``torch_dynamo_backends``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fxshard.capture import Capture
from fxshard.inspect.dump import Dump
from fxshard.options import parse_options


def fxshard(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's: fuse, schedule and lower the collectives of sharded parameters.

    ``options`` are those of ``fxshard.options.Options``; ``mode`` is one of torch.compile's modes and sets Inductor's
    settings for it. A graph without sharded parameters is just compiled. Raises ``ValueError`` for a bad option.
    """
    return Capture(parse_options(options, mode), Dump.from_environment()).compile(gm, example_inputs)
