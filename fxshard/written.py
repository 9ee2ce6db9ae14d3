"""Writes to full parameters in a forward that is about to be compiled.

A full parameter is a copy for the time of the forward. AOTAutograd would turn a write to it into a value that nothing
reads, so it would be lost without a word.
"""

from __future__ import annotations

from torch import fx

from fxshard.facts import GATHER
from fxshard.registry import lookup


def check_unwritten(gm: fx.GraphModule) -> None:
    """``RuntimeError`` naming the parameter if a graph of Dynamo's writes in place to a gathered one, or a view of it.

    Dynamo ran the graph on fake tensors, whose version counters say so.
    """
    for graph in (m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)):
        for node in graph.nodes:
            if node.op == "call_function" and node.target in (GATHER, GATHER.overloadpacket):
                value = node.meta.get("example_value")
                if value is not None and not value.is_inference() and value._version:
                    slot = lookup(node.args[1]).slots[node.args[2]]
                    raise RuntimeError(
                        f"forward writes in place to parameter {slot.name!r}; a full parameter is a copy for the time "
                        "of the forward, so the write would be lost. Keep such state in a buffer, or write to the "
                        "parameter outside forward"
                    )
