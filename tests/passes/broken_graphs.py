"""Finished graphs with one thing broken, and what `verify` says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pass_graphs import backward, finished, forward, param, sharded
from torch import fx

from fxshard.bucket import ParamBucket
from fxshard.passes.rewrite import MARK, call
from fxshard.passes.schedule_overlap import LAUNCHES, WAIT
from fxshard.passes.verify import VerifyError, verify
from fxshard.plan import Plan

Break = Callable[[fx.GraphModule], None]


def layers(names: str = "abc", **options: Any) -> dict[str, ParamBucket]:
    """A unit for each letter, with parameters `p0` (4×4) and `p1` (4)."""
    return sharded(**options, **{name: [param(4, 4), param(4)] for name in names})


def launch(gm: fx.GraphModule, op: str, bucket: str) -> fx.Node:
    return next(n for n in gm.graph.nodes if LAUNCHES.get(n.target) == op and n.meta[MARK] == bucket)


def wait(gm: fx.GraphModule, op: str, bucket: str) -> fx.Node:
    return next(u for u in launch(gm, op, bucket).users if u.target is WAIT)


def node(gm: fx.GraphModule, target: Any) -> fx.Node:
    """The first call of ``target``."""
    return next(n for n in gm.graph.nodes if n.op == "call_function" and n.target is target)


def call_before(place: fx.Node, target: Any, *args: Any) -> fx.Node:
    with place.graph.inserting_before(place):
        return call(place.graph, target, *args)


def message(gm: fx.GraphModule, plan: Plan | None, **options: Any) -> str:
    with pytest.raises(VerifyError) as caught:
        verify(gm, plan, **options)
    return str(caught.value)


def forward_broken_by(break_it: Break, prefetch: int = 1) -> str:
    gm, plan = finished(forward(layers()), prefetch=prefetch)
    break_it(gm)
    return message(gm, plan)


def backward_broken_by(break_it: Break) -> str:
    gm, plan = finished(backward(layers()), "backward")
    break_it(gm)
    return message(gm, plan)
