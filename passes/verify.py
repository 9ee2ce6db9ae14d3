"""What must hold in any graph of collectives, re-derived from the graph instead of trusted.

Of every graph, also of those that fxshard did not make:

* each launch has exactly one wait, which comes before every use of what was communicated.

Of a graph with its plan:

* every per-parameter collective is fused, unless its bucket's refusal is recorded; after the last pass no fxshard op
  is left;
* each planned collective is in the graph once, and none that is not planned: a bucket is gathered at most once, every
  gradient reduced exactly once, frozen parameters never;
* collectives move the bucket's own buffers, parameters and gradients at their layout offsets. So no part of the graph
  depends on the rank, and its text is the same everywhere;
* launches of each kind, hence on each process group, come in the plan's order: the same on all ranks;
* where a unit reshards, forward keeps no view of its gathered buffer for backward;
* no more is gathered or in flight than was asked for; see [Note: gathered and in flight].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxshard import _torch
from fxshard.facts import ADD_WAITING, GATHER, GATHER_PART, KEEP_PART, REDUCE, key_of, nodes_of, source_of
from fxshard.passes import bucket_all_gather, bucket_reduce_scatter, lower_layout, schedule_overlap
from fxshard.passes.liveness import Lifetime, aliases, lifetimes
from fxshard.passes.rewrite import MARK, fake_of
from fxshard.passes.schedule_overlap import LAUNCHES, WAIT
from fxshard.plan import BucketFacts, Collective, Plan
from fxshard.registry import lookup

_aten = torch.ops.aten
_SCALES = (_aten.div.Tensor, _aten.mul.Tensor, ADD_WAITING)  # element by element, on a whole buffer
_COMPLEX_FORMS = (_aten.view.default, _aten.view_as_real.default, _aten.view_as_complex.default)  # pairs of reals
_PASSES = (bucket_all_gather.NAME, bucket_reduce_scatter.NAME, schedule_overlap.NAME, lower_layout.NAME)


class VerifyError(RuntimeError):
    """A rule of ``verify`` does not hold. The message shows the graph around the node that breaks it."""

    def __init__(self, said: str, at: fx.Node | None = None) -> None:
        super().__init__(said if at is None else f"{said}\n{window(at)}")


def window(node: fx.Node, around: int = 3) -> str:
    """The graph's text from ``around`` nodes before ``node`` to as many after it."""
    nodes = list(node.graph.nodes)
    place = nodes.index(node)
    shown = nodes[max(place - around, 0) : place + around + 1]
    return "\n".join(f"  {'>' if n is node else ' '} {n.format_node()}" for n in shown)


def verify(gm: fx.GraphModule, plan: Plan | None = None, *, after: str | None = None) -> None:
    """Raise ``VerifyError`` with the rule and the nodes if the graph breaks one. Not collective; changes nothing.

    Without ``plan`` only the rules of launches and waits apply. ``after`` names the last pass that ran; None: all did.
    ``ValueError`` for an unknown pass.
    """
    if after is not None and after not in _PASSES:
        raise ValueError(f"no pass is named {after!r}; passes are {', '.join(_PASSES)}")
    _check_waits(gm.graph)
    if plan is None:
        return
    ran = _PASSES if after is None else _PASSES[: _PASSES.index(after) + 1]
    refused = {r.bucket: r.key for r in gm.meta.get("fxshard_refusals", ())}
    launches = [n for n in gm.graph.nodes if n.target in LAUNCHES and MARK in n.meta]
    _check_fused(gm.graph, ran, refused.values())
    _check_counts(gm.graph, launches, plan, ran, refused)
    _check_order(launches, plan)
    for launch in launches:
        planned = next(
            c
            for c in (*plan.gathers, *plan.reductions)
            if (c.op, c.bucket) == (LAUNCHES[launch.target], launch.meta[MARK])
        )
        _check_buffers(launch, plan.bucket(planned.bucket), planned.ranks)
        _check_parameters(launch, plan.bucket(planned.bucket), planned)
    if plan.kind == "forward":
        _check_saved(gm.graph, launches, plan)
    _check_budget(gm.graph, plan)


# ---- launches and waits, of any graph --------------------------------------------------------------------------------


def _check_waits(graph: fx.Graph) -> None:
    place = {n: i for i, n in enumerate(graph.nodes)}
    for launch in graph.nodes:
        if not _is_launch(launch):
            continue
        for buffer in _buffers(launch):
            wait = _check_wait(launch, buffer)
            uses = [(buffer, wait), *((alias, use) for alias in aliases(wait) for use in alias.users)]
            early = next((use for made, use in uses if place[use] < place[made]), None)
            if early is not None:
                raise VerifyError(
                    f"{early.name} stands before {wait.name}, the wait of {_said(launch)}, but uses what it waits for; "
                    "move the wait before its first use",
                    early,
                )


def _check_wait(launch: fx.Node, buffer: fx.Node) -> fx.Node:
    """The one wait of a buffer that a launch fills, after a look at everybody else who reads the buffer."""
    unwaited = aliases(buffer, waited=False)
    readers = dict.fromkeys(user for alias in unwaited for user in alias.users if user not in unwaited)
    waits = [r for r in readers if r.target is WAIT]
    if len(waits) != 1:
        there = f" ({', '.join(w.name for w in waits)})" if waits else ""
        todo = "keep the first" if waits else "wait for it before its first use"
        raise VerifyError(f"{_said(launch)} has {len(waits)} waits{there}, but needs exactly one; {todo}", launch)
    other = next((r for r in readers if r.target is not WAIT), None)
    if other is not None:
        raise VerifyError(f"{other.name} reads {_said(launch)} without its wait; read {waits[0].name} instead", other)
    return waits[0]


def _is_launch(node: fx.Node) -> bool:
    """Whether a node starts a collective: one of ours or any other functional one."""
    return getattr(node.target, "namespace", "") == "_c10d_functional" and node.target is not WAIT


def _buffers(launch: fx.Node) -> list[fx.Node]:
    """What a launch fills: its value, or for a coalesced one the tensors of its list."""
    several = isinstance(launch.meta.get("val"), (list, tuple))
    return list(launch.users) if several else [launch]


# ---- which collectives there are -------------------------------------------------------------------------------------


def _check_fused(graph: fx.Graph, ran: tuple[str, ...], refused: Container[object]) -> None:
    """No op is left that a pass which ran should have replaced."""
    replaced_by: dict[Any, str] = {
        GATHER: bucket_all_gather.NAME,
        KEEP_PART: bucket_all_gather.NAME,
        GATHER_PART: bucket_all_gather.NAME,
        REDUCE: bucket_reduce_scatter.NAME,
        lower_layout.VIEW: lower_layout.NAME,
        lower_layout.PACK: lower_layout.NAME,
        ADD_WAITING: lower_layout.NAME,
    }
    for node in nodes_of([graph], tuple(replaced_by)):
        name = replaced_by[node.target]
        if name in ran and not (node.target is REDUCE and node.args[1] in refused):
            raise VerifyError(
                f"{node.name} ({node.target}) is still there after {name}, which replaces it; "
                "a bucket that the pass leaves alone needs a Refusal that says why",
                node,
            )


def _check_counts(
    graph: fx.Graph, launches: list[fx.Node], plan: Plan, ran: tuple[str, ...], refused: Mapping[str, str]
) -> None:
    there = Counter((LAUNCHES[n.target], n.meta[MARK]) for n in launches)
    planned = {(c.op, c.bucket) for c in (*plan.gathers, *plan.reductions)}
    for launch in launches:
        op, bucket = LAUNCHES[launch.target], launch.meta[MARK]
        if there[op, bucket] > 1:
            many = f"{there[op, bucket]} {op}s in the {plan.kind} graph"
            raise VerifyError(f"bucket {bucket} has {many}, but one serves the whole graph; merge them", launch)
        if (op, bucket) not in planned:
            raise VerifyError(f"{_said(launch)} is not in the {plan.kind} plan; plan it or erase it", launch)
    for node, frozen in _reductions_of_frozen(graph, launches, plan):
        raise VerifyError(f"{node.name} reduces gradients of bucket {frozen}, which is frozen; erase it", node)
    due = [*plan.gathers] if bucket_all_gather.NAME in ran else []
    due += plan.reductions if bucket_reduce_scatter.NAME in ran else ()
    for c in due:
        if c.ranks > 1 and not there[c.op, c.bucket] and c.bucket not in refused:
            raise VerifyError(
                f"the {plan.kind} plan has a {c.op} of bucket {c.bucket}, but the graph has no launch for it, so "
                f"{', '.join(plan.bucket(c.bucket).params[i] for i in c.ids)} would hold one rank's part alone; "
                "launch it or plan the graph again"
            )


def _reductions_of_frozen(graph: fx.Graph, launches: list[fx.Node], plan: Plan) -> Iterable[tuple[fx.Node, str]]:
    for node in launches:
        if LAUNCHES[node.target] != "all_gather" and not plan.bucket(node.meta[MARK]).requires_grad:
            yield node, node.meta[MARK]
    for node in nodes_of([graph], [REDUCE, lower_layout.PACK]):
        bucket = lookup(key_of(node))
        if not bucket.requires_grad:
            yield node, bucket.name


def _check_order(launches: list[fx.Node], plan: Plan) -> None:
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        wanted = [c.bucket for c in (*plan.gathers, *plan.reductions) if c.op == kind]
        there = [n for n in launches if LAUNCHES[n.target] == kind]
        wanted = [b for b in wanted if b in {n.meta[MARK] for n in there}]
        for node, bucket in zip(there, wanted, strict=True):
            if node.meta[MARK] != bucket:
                raise VerifyError(
                    f"{kind}s are launched in the order {', '.join(n.meta[MARK] for n in there)}, but the plan's "
                    f"order, which all ranks share, is {', '.join(wanted)}; launch {bucket} before {node.meta[MARK]}",
                    node,
                )


# ---- what they move --------------------------------------------------------------------------------------------------


def _check_buffers(launch: fx.Node, bucket: BucketFacts, ranks: int) -> None:
    """Sizes, dtype and number of ranks are the bucket's: facts that hold on every rank."""
    op = LAUNCHES[launch.target]
    whole = {"all_gather": ("segment", "size"), "reduce_scatter": ("size", "segment"), "all_reduce": ("segment",) * 2}
    dtype = getattr(torch, bucket.gather if op == "all_gather" else bucket.reduce)
    source = source_of(launch)
    if op == "all_gather" and ranks != bucket.shard_size:
        whole[op] = ("part", "size")
    for role, node, name in zip(("input", "output"), (source, launch), whole[op], strict=True):
        numel = (bucket.size // ranks if name == "part" else getattr(bucket, name)) * (2 if dtype.is_complex else 1)
        if fake_of(node).numel() != numel or fake_of(node).dtype != dtype.to_real():
            raise VerifyError(
                f"{_said(launch)} has an {role} of {fake_of(node).numel()} {fake_of(node).dtype}, but the bucket's "
                f"{name} is {numel} {dtype.to_real()} on every rank; pass the bucket's own buffer",
                launch,
            )
    if op != "all_reduce" and launch.args[-2] != ranks:
        raise VerifyError(
            f"{_said(launch)} is over {launch.args[-2]} ranks, but the plan's is over {ranks}; use the group of those",
            launch,
        )
    if op == "all_reduce" and bucket.shard_size > 1 and not _is_reduced_segment(source, bucket):
        raise VerifyError(
            f"{_said(launch)} sums {source.name}, but has to sum what the bucket's reduce_scatter gives", launch
        )


def _is_reduced_segment(node: fx.Node, bucket: BucketFacts) -> bool:
    while node.target in _SCALES or node.target in _COMPLEX_FORMS:
        node = source_of(node)
    if node.target is not WAIT:
        return False
    launch = source_of(node)
    return LAUNCHES.get(launch.target) == "reduce_scatter" and launch.meta.get(MARK) == bucket.name


def _check_parameters(launch: fx.Node, bucket: BucketFacts, planned: Collective) -> None:
    """Parameters are read from, and gradients packed, where the layout has them."""
    if planned.op == "all_reduce" and bucket.shard_size > 1:
        return  # sums what a reduce_scatter packed
    check = _check_views if planned.op == "all_gather" else _check_packed
    check(launch, bucket, planned)


def _places(bucket: BucketFacts, ids: Iterable[int]) -> dict[tuple[int, int], int]:
    """(first, past the last) element in the layout of each parameter."""
    return {(o := bucket.offsets[i], o + torch.Size(bucket.shapes[i]).numel()): i for i in ids}


def _check_views(launch: fx.Node, bucket: BucketFacts, planned: Collective) -> None:
    full = schedule_overlap.wait_of(launch)
    if bucket.gather.startswith("complex"):
        full = _only(_only(full))  # pairs of reals, then complex again
    places = _places(bucket, planned.ids)
    for view in full.users:
        if view.target is bucket_all_gather.TAKE_PART:
            known = True
        elif view.target is lower_layout.VIEW:
            known = view.args[2] in planned.ids
        else:
            known = (0, bucket.size) in places or (view.target is _aten.slice.Tensor and view.args[2:] in places)
        if not known:
            raise VerifyError(
                f"{view.name} reads a part of the gathered buffer of bucket {bucket.name} that is no parameter of the "
                f"plan; read one of {_said_places(bucket, places)}",
                view,
            )


def _only(node: fx.Node) -> fx.Node:
    return next(iter(node.users))


def _check_packed(launch: fx.Node, bucket: BucketFacts, planned: Collective) -> None:
    packed = source_of(launch)
    while packed.target in (*_SCALES, _aten.view.default, _aten.view_as_real.default):
        packed = source_of(packed)
    places = _places(bucket, planned.ids)
    if packed.target is lower_layout.PACK:
        wrong = {*tree_leaves(packed.args[2])} != {*planned.ids}
    else:
        found = _pieces(packed) if packed.target is lower_layout.CONCAT else {}
        wrong = found != {place: 1 for place in places if place[0] < place[1]}
    if wrong:
        raise VerifyError(
            f"{packed.name}, which {_said(launch)} sums, has not every planned gradient once and at its place, zeros "
            f"elsewhere; pack {_said_places(bucket, places)}",
            packed,
        )


def _pieces(concat: fx.Node) -> Counter[tuple[int, int]]:
    """(first, past the last) element of each piece of a packed buffer."""
    pieces, offsets, _ = concat.args
    assert isinstance(pieces, (list, tuple)) and isinstance(offsets, (list, tuple))
    return Counter((at, at + fake_of(p).numel()) for p, at in zip(pieces, offsets, strict=True))  # type: ignore[arg-type, operator, misc]


def _said_places(bucket: BucketFacts, places: dict[tuple[int, int], int]) -> str:
    return ", ".join(f"{bucket.params[i]} at [{start}, {end})" for (start, end), i in places.items())


# ---- memory ----------------------------------------------------------------------------------------------------------


def _check_saved(graph: fx.Graph, launches: list[fx.Node], plan: Plan) -> None:
    kept = set(_torch.saved_for_backward(graph))
    for launch in launches:
        bucket = plan.bucket(launch.meta[MARK])
        saved = next((n for n in aliases(launch) if n in kept), None)
        if LAUNCHES[launch.target] == "all_gather" and bucket.reshard and saved is not None:
            raise VerifyError(
                f"{saved.name} is a view of the gathered buffer of bucket {bucket.name} and is kept for backward, "
                f"though unit {bucket.unit} reshards after forward: the whole buffer would stay allocated. Recompute "
                "it from a second all_gather, or shard the unit with reshard_after_forward=False",
                saved,
            )


def _check_budget(graph: fx.Graph, plan: Plan) -> None:
    found = lifetimes(graph, plan)
    flying = max(plan.in_flight, 1)
    limits = {"all_gather": max(plan.prefetch, 1), "reduce_scatter": flying, "all_reduce": flying}
    for now in found:
        pending = [f for f in found if f.op == now.op and f.start <= now.start < f.waited]
        units = dict.fromkeys(plan.bucket(f.bucket).unit for f in pending)
        if len(units) > limits[now.op]:
            asked = f"prefetch {plan.prefetch} allows {limits[now.op]}"
            allowed = asked if now.op == "all_gather" else f"in_flight {plan.in_flight} allows {limits[now.op]}"
            raise VerifyError(
                f"when {_said(now.launch)} is launched, {now.op}s of {len(units)} units are launched and not waited "
                f"for ({_said_sizes(pending)}), but {allowed}; launch it later or wait for the first one earlier",
                now.launch,
            )


def _said_sizes(pending: list[Lifetime]) -> str:
    return ", ".join(f"{f.bucket} {f.nbytes} bytes" for f in pending)


def _said(launch: fx.Node) -> str:
    op = LAUNCHES.get(launch.target, launch.target)
    where = f" of bucket {launch.meta[MARK]}" if MARK in launch.meta else ""
    return f"{launch.name} ({op}{where})"
