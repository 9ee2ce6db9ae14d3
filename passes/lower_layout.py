"""Turn views and packs into plain ATen at GlobalLayout offsets, so that no fxshard op is left.

before:  w = param_view(full, b, i)
after:   w = view(slice(full, 0, offset, offset + numel), shape)       for a cut along dim k > 0: permute(…)

before:  p = pack_grads([g0, g1], b, [0, 1])
after:   p = concat([g0, g1], offsets, size)                   in layout order, each cast to the reduce dtype

before:  p = add_waiting(p, b, kept, stage)
after:   add_waiting_(p, b, kept, stage)                       in place: nothing else reads a buffer before it is sent

A view is no copy: matmuls read the gathered buffer where it lies. Nor need a concat be one: see ``fxshard._inductor``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from fxshard.bucket import ParamBucket
from fxshard.facts import ADD_WAITING, key_of, nodes_of, source_of
from fxshard.passes.rewrite import MARK, call, convert, fake_of, mark
from fxshard.registry import lookup

NAME = "lower_layout"
_aten = torch.ops.aten
VIEW = torch.ops.fxshard.param_view.default
PACK = torch.ops.fxshard.pack_grads.default
CONCAT = torch.ops.fxshard.concat.default
ADD_WAITING_ = torch.ops.fxshard.add_waiting_.default


def run(gm: fx.GraphModule) -> PassResult:
    found = list(nodes_of([gm.graph], [VIEW, PACK, ADD_WAITING]))
    for node in found:
        if node.target is ADD_WAITING:
            with gm.graph.inserting_before(node):
                mark(node.meta[MARK], gm.graph.call_function(ADD_WAITING_, node.args)).meta["val"] = None
            node.replace_all_uses_with(source_of(node))
            gm.graph.erase_node(node)
            continue
        bucket = lookup(key_of(node))
        with gm.graph.inserting_before(node):
            lowered = _view(gm.graph, node, bucket) if node.target is VIEW else _pack(gm.graph, node, bucket)
        if MARK in node.meta:
            mark(node.meta[MARK], lowered)
        node.replace_all_uses_with(lowered)
        gm.graph.erase_node(node)
    return PassResult(gm, modified=bool(found))


def _view(graph: fx.Graph, node: fx.Node, bucket: ParamBucket) -> fx.Node:
    full, _, index = node.args
    assert isinstance(full, fx.Node) and isinstance(index, int)
    at, shape = bucket.layout.get_tensor_range(index), bucket.layout.tensor_shapes[index]
    piece = full
    if at.numel != bucket.layout.size:
        piece = call(graph, _aten.slice.Tensor, full, 0, at.start, at.end)
    view = call(graph, _aten.view.default, piece, list(shape)) if len(shape) > 1 else piece
    dim = bucket.slots[index].cut.dim
    if dim == 0:
        return view
    return call(graph, _aten.permute.default, view, [*range(1, dim + 1), 0, *range(dim + 1, len(shape))])


def _pack(graph: fx.Graph, node: fx.Node, bucket: ParamBucket) -> fx.Node:
    grads, _, ids = node.args
    assert isinstance(grads, Sequence) and isinstance(ids, Sequence)
    by_id: dict[int, fx.Node] = {}
    for i, grad in zip(ids, grads, strict=True):
        assert isinstance(i, int) and isinstance(grad, fx.Node)
        cast = convert(graph, grad, bucket.dtypes.reduce)
        by_id[i] = call(graph, _aten.add.Tensor, by_id[i], cast) if i in by_id else cast

    pieces: list[fx.Node] = []
    offsets: list[int] = []
    for i in sorted(by_id, key=lambda i: bucket.layout.tensor_to_offset[i]):
        there = bucket.layout.get_tensor_range(i)
        if there.numel:
            pieces.append(_stored(graph, by_id[i], bucket.slots[i].cut.dim))
            offsets.append(there.start)
    if not pieces:  # gradients without elements
        kind = {"dtype": bucket.dtypes.reduce, "device": bucket.device, "pin_memory": False}
        return call(graph, _aten.full.default, [bucket.layout.size], 0, **kind)
    return call(graph, CONCAT, pieces, offsets, bucket.layout.size)


def _stored(graph: fx.Graph, grad: fx.Node, dim: int) -> fx.Node:
    """A gradient in storage form."""
    if dim == 0:
        return grad
    return call(graph, _aten.permute.default, grad, [dim, *(d for d in range(fake_of(grad).ndim) if d != dim)])
