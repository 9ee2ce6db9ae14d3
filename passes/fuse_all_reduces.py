"""One all-reduce a bucket where reductions stay one per parameter (option ``fuse="all-reduces"``).

before:  r0 = reduce_grad(g0, b, 0);  r1 = reduce_grad(g1, b, 1);  flat_grad = add(r0, r1)
after:   r0 = scatter_grad(g0, b, 0);  r1 = scatter_grad(g1, b, 1)    over shards alone, reduce dtype
         s = add(r0, r1)                                               each in its own slot, zeros elsewhere
         s = constant_pad_nd(s, zeros)                                 to a multiple of 512 bytes
         t = all_reduce(s, "sum")
         ...
         flat_grad = convert_element_type(div(slice(wait_tensor(t)), replicas), storage dtype)    before it is returned

Between captured and fused graphs: it shows what one fused all-reduce over the replicas does by itself. An all-reduce is
launched when its bucket's gradients are complete, and waited for at the end of the graph.

Leaves alone: buckets without replicas; gradients that are not reduced all the way; shares that are used otherwise than
in one sum of them all, or are scaled differently.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from fxshard.bucket import ParamBucket
from fxshard.facts import ADD, REDUCE, Buckets, index_of, key_of, source_of
from fxshard.passes.bucket_reduce_scatter import sums_of
from fxshard.passes.rewrite import call, convert, fake_of, mark, move_before

NAME = "fuse_all_reduces"
ALIGNMENT = 512
"""Bytes of which the all-reduced buffer is a multiple."""

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten
SCATTER = torch.ops.fxshard.scatter_grad.default


def run(gm: fx.GraphModule) -> PassResult:
    fused = [_fuse(gm.graph, bucket, name) for name, bucket in Buckets.of([gm.graph]).by_name.items()]
    return PassResult(gm, modified=any(fused))


def _fuse(graph: fx.Graph, bucket: ParamBucket, name: str) -> bool:
    sums, tops, ways = sums_of(graph, bucket)
    if bucket.groups.replicate is None or bucket.dtypes.reduce.is_complex or len(tops) != 1 or len(ways) != 1:
        return False
    [(stage, scale)] = ways
    if stage not in ("all", "main"):
        return False
    new: dict[fx.Node, fx.Node] = {}
    for node in sums:
        with graph.inserting_before(node):
            if node.target is REDUCE:
                scaled = () if scale is None else (scale,)
                new[node] = call(graph, SCATTER, source_of(node), key_of(node), index_of(node), *scaled)
            else:
                new[node] = call(graph, ADD, *(new[arg] for arg in node.args))  # type: ignore[index]
    with graph.inserting_before(tops[0]):
        total, chain = _all_reduce(graph, new[tops[0]], bucket, name)
    tops[0].replace_all_uses_with(total)
    for node in reversed(sums):
        graph.erase_node(node)
    move_before(next(n for n in reversed(graph.nodes) if n.op == "output"), chain)
    return True


def _all_reduce(
    graph: fx.Graph, segment: fx.Node, bucket: ParamBucket, name: str
) -> tuple[fx.Node, list[fx.Node]]:
    """What comes of a segment, and the nodes from the wait on."""
    groups, rule = bucket.groups, bucket.reduction
    size = fake_of(segment).numel()
    padding = padding_of(size, bucket.dtypes.reduce)
    sent = call(graph, _aten.constant_pad_nd.default, segment, [0, padding], 0) if padding else segment
    node = mark(name, call(graph, _c10d.all_reduce.default, sent, rule.op, groups.replicate))
    chain = [mark(name, call(graph, _c10d.wait_tensor.default, node))]
    if padding:
        chain.append(call(graph, _aten.slice.Tensor, chain[-1], 0, 0, size))
    if rule.after_replicate != 1:
        chain.append(call(graph, _aten.div.Tensor, chain[-1], rule.after_replicate))
    if (last := convert(graph, chain[-1], bucket.grad_dtype)) is not chain[-1]:
        chain.append(last)
    if bucket.offloaded_from is not None:
        chain.append(call(graph, _aten._to_copy.default, chain[-1], device=bucket.flat.device))
    return chain[-1], chain


def padding_of(size: int, dtype: torch.dtype) -> int:
    """Elements behind ``size`` elements up to the next multiple of ``ALIGNMENT`` bytes."""
    return -size % (ALIGNMENT // dtype.itemsize)
