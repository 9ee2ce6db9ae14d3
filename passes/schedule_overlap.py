"""Launch early and wait late, so that one layer communicates while its neighbour computes.

before (prefetch 1, forward):          after:
    g0 = launch; w0 = wait(g0)             g0 = launch; w0 = wait(g0)
    compute blocks.0                       g1 = launch
    g1 = launch; w1 = wait(g1)             compute blocks.0
    compute blocks.1                       w1 = wait(g1)
                                           compute blocks.1

before (backward):                     after:
    p1 = pack; r1 = launch; s1 = wait      p1 = pack; r1 = launch
    compute blocks.0                       compute blocks.0
    p0 = pack; r0 = launch; s0 = wait      p0 = pack; s1 = wait(r1); r0 = launch
                                           s0 = wait(r0) at the end

Carries out the plan's anchors and decides nothing. What a wait feeds without other data (division, cast) goes with it;
what a launch needs from the flat shard alone (the cast) goes with the launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from fxshard.passes.rewrite import MARK, move_after, move_before
from fxshard.plan import Anchor, Plan

NAME = "schedule_overlap"
_c10d = torch.ops._c10d_functional
LAUNCHES: dict[Any, str] = {
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    _c10d.all_reduce.default: "all_reduce",
}
WAIT = _c10d.wait_tensor.default

Launches = dict[tuple[str, str], fx.Node]


def run(gm: fx.GraphModule, plan: Plan) -> PassResult:
    graph = gm.graph
    before = [n.name for n in graph.nodes]
    launches = {
        (LAUNCHES[n.target], n.meta[MARK]): n for n in graph.nodes if n.target in LAUNCHES and MARK in n.meta
    }
    _schedule_gathers(graph, plan, launches)
    for op in ("reduce_scatter", "all_reduce"):  # all-reduces are placed around the waits of reduce-scatters
        _schedule_reductions(graph, plan, op, launches)
    return PassResult(gm, modified=before != [n.name for n in graph.nodes])


def wait_of(launch: fx.Node) -> fx.Node:
    """The one wait of a launch."""
    return next(u for u in launch.users if u.target is WAIT)


def _schedule_gathers(graph: fx.Graph, plan: Plan, launches: Launches) -> None:
    last: dict[Anchor, fx.Node] = {}  # where launches of one anchor end, so that they keep the plan's order
    for planned in plan.gathers:
        launch = launches.get((planned.op, planned.bucket))
        if launch is None or planned.launch.at == "first use":
            continue
        place = last.get(planned.launch)
        if place is None and planned.launch.at == "after wait":
            place = wait_of(launches[planned.op, planned.launch.bucket])
        chain = [*_only_inputs(launch), launch]
        if place is None:
            start = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr") and n not in chain)
            move_before(start, chain)
        else:
            move_after(place, chain)
        last[planned.launch] = launch


def _schedule_reductions(graph: fx.Graph, plan: Plan, op: str, launches: Launches) -> None:
    for planned in plan.reductions:
        launch = launches.get((planned.op, planned.bucket))
        if planned.op != op or launch is None or planned.wait.at == "at launch":
            continue
        tail = _tail(launch)
        if planned.launch.at in ("before launch", "end"):
            move_before(_place(graph, plan, planned.launch, launches), [launch, *tail])
        order = {n: i for i, n in enumerate(graph.nodes)}
        done = min([_place(graph, plan, planned.wait, launches), *tail[-1].users], key=lambda n: order[n])
        if order[done] > order[launch]:
            move_before(done, tail)


def _place(graph: fx.Graph, plan: Plan, anchor: Anchor, launches: Launches) -> fx.Node:
    """The node before which the anchor is. Where its bucket's reductions were left alone, the next bucket's count."""
    if anchor.at == "end":
        return next(n for n in reversed(graph.nodes) if n.op == "output")
    first = launches.get(("reduce_scatter", anchor.bucket)) or launches.get(("all_reduce", anchor.bucket))
    if first is None:
        following = next(c.wait for c in plan.reductions if c.bucket == anchor.bucket)
        return _place(graph, plan, following, launches)
    return wait_of(first) if anchor.at == "before wait" else first


def _only_inputs(launch: fx.Node) -> list[fx.Node]:
    """What the launch needs beside placeholders, if nobody else uses it: the cast of the flat shard."""
    chain: list[fx.Node] = []
    node = launch.args[0]
    while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
        chain.insert(0, node)
        node = node.args[0]
    return chain


def _tail(launch: fx.Node) -> list[fx.Node]:
    """The wait of ``launch`` and what is made of it alone, the next stage included, up to what is returned."""
    chain = [wait_of(launch)]
    while len(chain[-1].users) == 1:
        user = next(iter(chain[-1].users))
        if user.op != "call_function" or sum(isinstance(a, fx.Node) for a in user.args) != 1:
            break
        chain.append(user)
    return chain
