"""Merge the gathers of one bucket into one all-gather.

before:  w0 = gather_param(flat, b, 0);  w1 = gather_param(flat, b, 1);  ...
after:   d = _to_copy(flat, device)                            only where the flat shard is offloaded
         c = convert_element_type(d, gather dtype)             only where the dtypes differ
         g = all_gather_into_tensor(c);  full = wait_tensor(g)
         w0 = param_view(full, b, 0);  w1 = param_view(full, b, 1);  ...

before:  p = keep_part(flat, b, ranks);  w0 = gather_part(p, b, 0, ranks);  ...
after:   as above, and p = take_part(full, b, ranks) behind the last use of full, if p is used elsewhere

before:  w0 = gather_part(p, b, 0, ranks);  ...                where p comes from another graph
after:   as above, with an all-gather of p over those ranks

The merged nodes stand at the first use of any member; repeated reads of a parameter become one view. With a shard size
of 1 the flat shard is the gathered buffer and there is no collective.

Leaves alone: gathers of different buckets.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from fxshard.bucket import ParamBucket
from fxshard.facts import GATHER, GATHER_PART, KEEP_PART, Buckets, key_of, nodes_of, sharing_of, source_of
from fxshard.mesh import part_of
from fxshard.passes.liveness import aliases
from fxshard.passes.rewrite import call, convert, fake_of, mark
from fxshard.plan import Plan
from fxshard.registry import lookup

NAME = "bucket_all_gather"
_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten
TAKE_PART = torch.ops.fxshard.take_part.default


def run(gm: fx.GraphModule, plan: Plan, buckets: Buckets) -> PassResult:
    for planned in plan.gathers:
        _merge(gm.graph, buckets, planned.bucket)
    return PassResult(gm, modified=bool(plan.gathers))


def _merge(graph: fx.Graph, buckets: Buckets, name: str) -> None:
    bucket = buckets.by_name[name]
    reads, kept = (
        [n for n in nodes_of([graph], targets) if lookup(key_of(n)) is bucket]
        for targets in ([GATHER, GATHER_PART], [KEEP_PART])
    )
    place = {n: i for i, n in enumerate(graph.nodes)}
    uses = [u for n in reads for u in n.users]
    first = min(uses or reads, key=lambda n: place[n])
    sent = source_of((kept or reads)[0])
    with graph.inserting_before(first):
        if (ranks := sharing_of(reads[0])) is None:
            full = _gather(graph, bucket, sent, name)
        else:
            full = _communicate(graph, sent, ranks, part_of(bucket.mesh, ranks).group, name)
        views: dict[int, fx.Node] = {}
        for read in reads:
            index = read.args[2]
            assert isinstance(index, int)
            if index not in views:
                views[index] = call(graph, torch.ops.fxshard.param_view.default, full, bucket.key, index)
                views[index].meta = {**read.meta, "val": fake_of(read)}
            read.replace_all_uses_with(views[index])
    for read in reads:
        graph.erase_node(read)
    for node in kept:
        _take_part(graph, node, full, name)


def _gather(graph: fx.Graph, bucket: ParamBucket, flat: fx.Node, name: str) -> fx.Node:
    groups, node = bucket.groups, flat
    if bucket.offloaded_from is not None:
        node = mark(name, call(graph, _aten._to_copy.default, flat, device=bucket.device))
    if fake_of(flat).dtype != bucket.dtypes.gather:
        node = mark(name, convert(graph, node, bucket.dtypes.gather))
    if groups.gather is None:
        return node
    return _communicate(graph, node, groups.shard_size, groups.gather, name)


def _communicate(graph: fx.Graph, node: fx.Node, ranks: int, group: str, name: str) -> fx.Node:
    is_complex = fake_of(node).dtype.is_complex
    if is_complex:
        node = call(graph, _aten.view.default, call(graph, _aten.view_as_real.default, node), [-1])
    node = mark(name, call(graph, _c10d.all_gather_into_tensor.default, node, ranks, group))
    node = mark(name, call(graph, _c10d.wait_tensor.default, node))
    if is_complex:
        node = call(graph, _aten.view_as_complex.default, call(graph, _aten.view.default, node, [-1, 2]))
    return node


def _take_part(graph: fx.Graph, kept: fx.Node, full: fx.Node, name: str) -> None:
    """What backward needs, where ``full`` is needed no longer."""
    if kept.users:
        place = {n: i for i, n in enumerate(graph.nodes)}
        uses = [u for alias in aliases(full) for u in alias.users if u.op != "output"]
        with graph.inserting_after(max([full, *uses], key=lambda n: place[n])):
            part = mark(name, call(graph, TAKE_PART, full, *kept.args[1:]))
        kept.replace_all_uses_with(part)
    graph.erase_node(kept)
