"""Merge the gathers of one bucket into one all-gather.

before:  w0 = gather_param(flat, b, 0);  w1 = gather_param(flat, b, 1);  ...
after:   d = _to_copy(flat, device)                            only where the flat shard is offloaded
         c = convert_element_type(d, gather dtype)             only where the dtypes differ
         g = all_gather_into_tensor(c);  full = wait_tensor(g)
         w0 = param_view(full, b, 0);  w1 = param_view(full, b, 1);  ...

The merged nodes stand at the first use of any member; repeated reads of a parameter become one view. With a shard size
of 1 the flat shard is the gathered buffer and there is no collective.

Leaves alone: gathers of different buckets.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from fxshard.bucket import ParamBucket
from fxshard.facts import GATHER, Buckets, key_of, nodes_of
from fxshard.passes.rewrite import call, convert, fake_of, mark
from fxshard.plan import Plan
from fxshard.registry import lookup

NAME = "bucket_all_gather"
_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten


def run(gm: fx.GraphModule, plan: Plan, buckets: Buckets) -> PassResult:
    for planned in plan.gathers:
        _merge(gm.graph, buckets, planned.bucket)
    return PassResult(gm, modified=bool(plan.gathers))


def _merge(graph: fx.Graph, buckets: Buckets, name: str) -> None:
    bucket = buckets.by_name[name]
    reads = [n for n in nodes_of([graph], [GATHER]) if lookup(key_of(n)) is bucket]
    place = {n: i for i, n in enumerate(graph.nodes)}
    uses = [u for n in reads for u in n.users]
    first = min(uses or reads, key=lambda n: place[n])
    flat = reads[0].args[0]
    assert isinstance(flat, fx.Node)
    with graph.inserting_before(first):
        full = _gather(graph, bucket, flat, name)
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


def _gather(graph: fx.Graph, bucket: ParamBucket, flat: fx.Node, name: str) -> fx.Node:
    groups, node = bucket.groups, flat
    if bucket.offloaded_from is not None:
        node = mark(name, call(graph, _aten._to_copy.default, flat, device=bucket.device))
    if fake_of(flat).dtype != bucket.dtypes.gather:
        node = mark(name, convert(graph, node, bucket.dtypes.gather))
    if groups.gather is None:
        return node
    is_complex = bucket.dtypes.gather.is_complex
    if is_complex:
        node = call(graph, _aten.view.default, call(graph, _aten.view_as_real.default, node), [-1])
    node = mark(name, call(graph, _c10d.all_gather_into_tensor.default, node, groups.shard_size, groups.gather))
    node = mark(name, call(graph, _c10d.wait_tensor.default, node))
    if is_complex:
        node = call(graph, _aten.view_as_complex.default, call(graph, _aten.view.default, node, [-1, 2]))
    return node
