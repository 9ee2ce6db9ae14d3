"""Merge the reductions of one bucket into one reduce-scatter (and one all-reduce over replicas).

before:  r0 = reduce_grad(g0, b, 0);  r1 = reduce_grad(g1, b, 1);  flat_grad = add(r0, r1)
after:   p = pack_grads([g0, g1], b, [0, 1])                    full gradients at their offsets, reduce dtype
         r = reduce_scatter_tensor(p, "sum");  s = wait_tensor(r)
         [t = all_reduce(s, "sum");  s = wait_tensor(t)]        where the mesh has replicas
         flat_grad = convert_element_type(div(s, ranks), storage dtype)

The merged nodes stand after the last gradient. Gradients of one parameter that is used several times are summed in the
reduce dtype before they are packed. Sum then division, in the reduce dtype, is the one convention of fxshard.

Leaves alone: a bucket whose shares are used otherwise than in one sum of them all (a ``Refusal`` says so).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from fxshard.bucket import ParamBucket
from fxshard.facts import ADD, REDUCE, Buckets, index_of, source_of
from fxshard.passes.rewrite import call, convert, mark
from fxshard.plan import Plan

NAME = "bucket_reduce_scatter"
_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten


@dataclass(frozen=True)
class Refusal:
    """A bucket whose reductions stay one per parameter, and why. ``key`` is the bucket's in the graph."""

    bucket: str
    key: str
    because: str


def run(gm: fx.GraphModule, plan: Plan, buckets: Buckets) -> PassResult:
    names = dict.fromkeys(c.bucket for c in plan.reductions)
    # The last one first: where buckets share their last gradient, each is put right after it.
    merged = [_merge(gm.graph, buckets, name) for name in reversed(names)]
    refusals = [m for m in merged if isinstance(m, Refusal)]
    if refusals:
        gm.meta["fxshard_refusals"] = refusals
    return PassResult(gm, modified=len(refusals) < len(merged))


def _merge(graph: fx.Graph, buckets: Buckets, name: str) -> Refusal | None:
    bucket = buckets.by_name[name]
    sums = _sums(graph, bucket.key)
    tops = [n for n in sums if any(user not in sums for user in n.users)]
    if len(tops) != 1:
        because = "its parameters' shares are used by something else than one sum of them all"
        return Refusal(name, bucket.key, because)
    shares = _added_up(tops[0], sums)
    place = {n: i for i, n in enumerate(graph.nodes)}
    last = max(map(source_of, shares), key=lambda n: place[n])
    if last.op == "placeholder":  # a gradient that backward is given as it is
        last = graph.find_nodes(op="placeholder")[-1]
    ordered = sorted(shares, key=index_of)
    with graph.inserting_after(last):
        anchor = graph.call_function(_aten.alias.default, (last,))  # a place to insert before; erased below
    with graph.inserting_before(anchor):
        grads, ids = [source_of(s) for s in ordered], [index_of(s) for s in ordered]
        packed = call(graph, torch.ops.fxshard.pack_grads.default, grads, bucket.key, ids)
        grad = _reduce(graph, bucket, packed, name)
    tops[0].replace_all_uses_with(grad)
    graph.erase_node(anchor)
    for node in reversed(sums):
        graph.erase_node(node)
    return None


def _sums(graph: fx.Graph, key: str) -> dict[fx.Node, None]:
    """The bucket's shares and every sum of nothing else, in graph order."""
    sums: dict[fx.Node, None] = {}
    for node in graph.nodes:
        is_share = node.target is REDUCE and node.args[1] == key
        if is_share or (node.target is ADD and not node.kwargs and all(arg in sums for arg in node.args)):
            sums[node] = None
    return sums


def _added_up(total: fx.Node, sums: Iterable[fx.Node]) -> list[fx.Node]:
    """The shares in a sum, in graph order; one that is in it several times comes as often."""
    times = Counter([total])
    for node in reversed(list(sums)):
        if node.target is ADD:
            for arg in node.args:
                assert isinstance(arg, fx.Node)
                times[arg] += times[node]
    return [n for n in sums if n.target is REDUCE for _ in range(times[n])]


def _reduce(graph: fx.Graph, bucket: ParamBucket, packed: fx.Node, name: str) -> fx.Node:
    groups, node = bucket.groups, packed
    is_complex = bucket.dtypes.reduce.is_complex and (groups.reduce is not None or groups.replicate is not None)
    if is_complex:
        node = call(graph, _aten.view.default, call(graph, _aten.view_as_real.default, node), [-1])
    stages: list[tuple[object, tuple[object, ...]]] = []
    if groups.reduce is not None:
        stages.append((_c10d.reduce_scatter_tensor.default, ("sum", groups.shard_size, groups.reduce)))
    if groups.replicate is not None:
        stages.append((_c10d.all_reduce.default, ("sum", groups.replicate)))
    for op, args in stages:
        launch = mark(name, call(graph, op, node, *args))
        node = mark(name, call(graph, _c10d.wait_tensor.default, launch))
    if is_complex:
        node = call(graph, _aten.view_as_complex.default, call(graph, _aten.view.default, node, [-1, 2]))
    if bucket.divisor != 1:
        node = mark(name, call(graph, _aten.div.Tensor, node, float(bucket.divisor)))
    if bucket.dtypes.storage != bucket.dtypes.reduce:
        node = mark(name, convert(graph, node, bucket.dtypes.storage))
    return node
