"""How long the buffers of collectives live, re-derived from a graph, whoever scheduled it.

[Note: gathered and in flight]
*gathered*   outputs of all-gathers, each from its launch to the last use of it or of a view of it.
*in flight*  inputs and outputs of reductions, each pair from launch to wait: until then neither can be freed.

A gathered buffer is, at any place of a graph, either *needed* (waited for, with a use still to come: the program keeps
it, however collectives are scheduled) or *ahead* (launched and not yet waited for: the schedule's doing). Gathers are
launched in order of first use, each unit's when the unit ``prefetch`` places before it is waited for, so at most
``max(prefetch, 1)`` units are ahead, and

    gathered  ≤  max needed + the largest max(prefetch, 1) consecutive units

where all layers are alike and used once: ``prefetch + 1`` layers. Reductions are waited for before the next unit's are
launched, so of each kind (reduce-scatter, all-reduce) the buffers of one unit are in flight.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxshard.facts import source_of
from fxshard.passes.rewrite import MARK, fake_of
from fxshard.passes.schedule_overlap import LAUNCHES, WAIT, wait_of
from fxshard.plan import Plan

# Views by meaning that their schemas do not call views.
_VIEWS = {torch.ops.aten._unsafe_view.default, torch.ops.fxshard.param_view.default}


@dataclass(frozen=True)
class Lifetime:
    """A bucket's collective in a graph, by numbers of nodes; ``nbytes`` are alive from ``start`` to ``end``."""

    launch: fx.Node
    op: str
    bucket: str
    start: int
    waited: int
    end: int
    nbytes: int


def is_view(node: fx.Node) -> bool:
    """Whether a node's value shares memory with its first argument's."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.is_view or node.target in _VIEWS
    return node.target is operator.getitem


def aliases(node: fx.Node, *, waited: bool = True) -> list[fx.Node]:
    """The node, its wait and all views of it; without ``waited``, only those made without waiting."""
    found = {node: None}
    for alias in (queue := [node]):
        for user in alias.users:
            shares = is_view(user) or (waited and user.target is WAIT)
            if shares and user.args[:1] == (alias,) and user not in found:
                found[user] = None
                queue.append(user)
    return list(found)


def lifetimes(graph: fx.Graph, plan: Plan) -> list[Lifetime]:
    """Every collective of the plan's buckets that is in the graph, in launch order. Each must have its wait."""
    place = {n: i for i, n in enumerate(graph.nodes)}
    names = {b.name for b in plan.buckets}
    found = []
    for node in graph.nodes:
        op = LAUNCHES.get(node.target)
        if op is None or node.meta.get(MARK) not in names:
            continue
        waited = end = place[wait_of(node)]
        nbytes = fake_of(node).nbytes
        if op == "all_gather":
            end = max(place[user] for alias in aliases(node) for user in alias.users)
        else:
            nbytes += fake_of(source_of(node)).nbytes
        found.append(Lifetime(node, op, node.meta[MARK], place[node], waited, end, nbytes))
    return found


def peak_bytes(graph: fx.Graph, plan: Plan) -> tuple[int, int]:
    """The most bytes (gathered, in flight) at any place of a graph; see [Note: gathered and in flight]."""
    found = lifetimes(graph, plan)
    gathers = [f for f in found if f.op == "all_gather"]
    return _peak(gathers), _peak([f for f in found if f.op != "all_gather"])


def _peak(found: Sequence[Lifetime]) -> int:
    return max((sum(f.nbytes for f in found if f.start <= at.start <= f.end) for at in found), default=0)
