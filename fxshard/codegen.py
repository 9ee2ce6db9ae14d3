"""From a rewritten graph to something that runs: Inductor's code, or the graph itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fxshard import _inductor, _torch, emitted
from fxshard.options import Options

log = logging.getLogger(__name__)
Compiled = Callable[[list[Any]], Any]


def generate(gm: fx.GraphModule, inputs: Sequence[Any], kind: str, options: Options, static: Sequence[int]) -> Compiled:
    """Code for a graph; takes its inputs as one list that it may empty.

    ``kind`` is forward, backward or inference; ``static`` are the numbers of inputs that stay at their address from
    call to call. Raises ``OrderError`` (or warns, by option) if Inductor's code moves a launch or a wait.
    """
    if options.codegen == "eager":
        return _torch.boxed_forward(gm)
    wanted = emitted.order_in_graph(gm.graph)
    compiled = _inductor.inductor_compile(gm, inputs, kind, static, dict(options.inductor))
    emitted.check(wanted, _inductor.emitted_code(compiled), options.check_order)
    return compiled
