"""Pack by copying: the form without writes into the reduce-scatter input, to compare with and to fall back to.

before:  p = concat([g0, g1], offsets, size)
after:   p = cat([view(g0, -1), zeros of the gap, view(g1, -1), ...])

Code generators copy each gradient that they did not compute in a pointwise kernel.

Leaves alone: everything else.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from fxshard.facts import nodes_of
from fxshard.passes.lower_layout import CONCAT
from fxshard.passes.rewrite import MARK, call, fake_of, mark

NAME = "copy_packs"
_aten = torch.ops.aten


def run(gm: fx.GraphModule) -> PassResult:
    found = list(nodes_of([gm.graph], [CONCAT]))
    for node in found:
        with gm.graph.inserting_before(node):
            cat = call(gm.graph, _aten.cat.default, _pieces(gm.graph, node))
        if MARK in node.meta:
            mark(node.meta[MARK], cat)
        node.replace_all_uses_with(cat)
        gm.graph.erase_node(node)
    return PassResult(gm, modified=bool(found))


def _pieces(graph: fx.Graph, concat: fx.Node) -> list[fx.Node]:
    like = fake_of(concat)
    pieces: list[fx.Node] = []
    at = 0

    def zeros_up_to(end: int) -> None:
        if end > at:
            kind = {"dtype": like.dtype, "device": like.device, "pin_memory": False}
            pieces.append(call(graph, _aten.full.default, [end - at], 0, **kind))

    grads, offsets, size = cast("tuple[list[fx.Node], list[int], int]", concat.args)
    for grad, offset in zip(grads, offsets, strict=True):
        zeros_up_to(offset)
        numel = fake_of(grad).numel()
        pieces.append(call(graph, _aten.reshape.default, grad, [numel]))
        at = offset + numel
    zeros_up_to(size)
    return pieces
