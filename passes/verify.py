"""What must hold in any graph of collectives, re-derived from the graph instead of trusted.

* every launch has exactly one wait, and nothing else reads it before;
* a bucket is gathered at most once in a graph, and reduced exactly as often as the plan says: once, frozen ones never;
* launches on one process group come in the plan's order, the same on every rank;
* where a unit reshards, no alias of a gathered buffer leaves the forward graph;
* no more bytes are gathered or in flight at once than asked.

Works on graphs that fxshard did not make, too: without a plan only the rules of launches and waits apply.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from fxshard.passes.rewrite import MARK
from fxshard.passes.schedule_overlap import LAUNCHES, WAIT
from fxshard.plan import Plan

_ALIASING = {"slice", "permute", "t", "transpose", "alias", "reshape", "select", "expand", "as_strided", "detach"}
_ALIASING |= {"view", "view_as_real", "view_as_complex", "param_view"}


class VerifyError(RuntimeError):
    """A rule of ``verify`` does not hold."""


def verify(gm: fx.GraphModule, plan: Plan | None = None) -> None:
    """Raise ``VerifyError`` with the rule and the nodes if the graph breaks one. Not collective; changes nothing."""
    launches = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in LAUNCHES]
    for launch in launches:
        _check_wait(launch)
    if plan is not None:
        _check_counts(launches, plan)
        _check_order(launches, plan)
        if plan.kind == "forward":
            _check_saved(gm, launches, plan)


def _check_wait(launch: fx.Node) -> None:
    waits = [u for u in launch.users if u.target is WAIT]
    if len(waits) != 1:
        raise VerifyError(f"{_said(launch)} has {len(waits)} waits; every launch has exactly one")
    others = [u for u in launch.users if u.target is not WAIT]
    if others:
        raise VerifyError(f"{_said(launch)} is read by {others[0].name} before its wait; read {waits[0].name} instead")


def _check_counts(launches: list[fx.Node], plan: Plan) -> None:
    there = Counter((LAUNCHES[n.target], n.meta[MARK]) for n in launches if MARK in n.meta)
    planned = {(c.op, c.bucket) for c in (*plan.gathers, *plan.reductions)}
    for (op, bucket), count in there.items():
        if count > 1:
            raise VerifyError(f"bucket {bucket} has {count} {op}s in the {plan.kind} graph; one serves the whole graph")
        if (op, bucket) not in planned:
            raise VerifyError(f"the {plan.kind} graph has a {op} of bucket {bucket} that its plan does not have")
        if op != "all_gather" and not plan.bucket(bucket).requires_grad:
            raise VerifyError(f"bucket {bucket} is frozen, but its gradients are reduced ({op})")


def _check_order(launches: list[fx.Node], plan: Plan) -> None:
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        wanted = [c.bucket for c in (*plan.gathers, *plan.reductions) if c.op == kind]
        there = [n.meta[MARK] for n in launches if LAUNCHES[n.target] == kind and MARK in n.meta]
        if there != [b for b in wanted if b in there]:
            raise VerifyError(f"{kind}s are launched in the order {there}, but the plan's order is {wanted}")


def _check_saved(gm: fx.GraphModule, launches: list[fx.Node], plan: Plan) -> None:
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    returned = {n for n in torch.utils._pytree.tree_leaves(output.args) if isinstance(n, fx.Node)}
    for launch in launches:
        if LAUNCHES[launch.target] != "all_gather" or MARK not in launch.meta:
            continue
        bucket = plan.bucket(launch.meta[MARK])
        saved = next((n for n in aliases(launch) if n in returned), None)
        if bucket.reshard and saved is not None:
            raise VerifyError(
                f"{saved.name} is a view of the gathered buffer of bucket {bucket.name} and is kept for backward, "
                f"though unit {bucket.unit} reshards after forward; the whole buffer would stay allocated"
            )


def aliases(launch: fx.Node) -> list[fx.Node]:
    """The launch, its wait and all views of it."""
    found = [launch]
    for node in found:
        for user in node.users:
            name = getattr(user.target, "__name__", "").split(".")[0]
            if (user.target is WAIT or name in _ALIASING) and user not in found:
                found.append(user)
    return found


def _said(node: fx.Node) -> str:
    where = f" of bucket {node.meta[MARK]}" if MARK in node.meta else ""
    return f"{node.name} ({LAUNCHES[node.target]}{where})"
