"""What is copied around the collectives of a graph, counted from the graph.

A copy is memory traffic that computes nothing. Casts are counted apart: a change of dtype around a collective is the
policy's doing, one of the whole buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxshard import emitted
from fxshard.facts import nodes_of, source_of
from fxshard.passes.bucket_all_gather import TAKE_PART
from fxshard.passes.lower_layout import CONCAT
from fxshard.passes.rewrite import CONVERT, fake_of
from fxshard.passes.schedule_overlap import LAUNCHES, wait_of

_aten = torch.ops.aten
_COPIES = {_aten.cat.default, _aten.clone.default, _aten.copy.default, _aten.constant_pad_nd.default, TAKE_PART}
# Nodes that Inductor runs as calls which allocate what they return, so that it cannot lie in a buffer of ours.
_ALLOCATE: set[Any] = {_aten.convolution_backward.default, _aten.embedding_dense_backward.default}


@dataclass(frozen=True)
class Copies:
    """Bytes of one run of a graph. ``gather`` and ``reduce``: copied before or behind all-gathers, and into what is
    reduced; ``cast``: written in another dtype for a collective; ``written``: gradients that are computed in place."""

    gather: int = 0
    reduce: int = 0
    cast: int = 0
    written: int = 0

    def __str__(self) -> str:
        said = f"{self.gather} bytes copied around all-gathers, {self.reduce} around reductions"
        return f"{said}; {self.cast} cast; {self.written} of gradients written in place"


def copies_of(graph: fx.Graph, codegen: str) -> Copies:
    """Count a lowered graph. ``codegen`` "eager" runs the nodes themselves, so every gradient is copied when packed;
    "inductor" lets kernels write to where a piece of a pack lies."""
    gather = reduce = cast = written = 0
    for launch in nodes_of([graph], tuple(LAUNCHES)):
        if LAUNCHES[launch.target] == "all_gather":
            around = [source_of(launch), *wait_of(launch).users]
            gather += sum(_nbytes(n) for n in around if n.target in _COPIES)
            cast += sum(_nbytes(n) for n in around[:1] if n.target is CONVERT)
    for pack in nodes_of([graph], (CONCAT, _aten.cat.default)):
        if pack.target is not CONCAT and not _is_reduced(pack):
            continue
        for piece in tree_leaves(pack.args[0]):
            nbytes = _nbytes(piece)
            piece = _unviewed(piece) if pack.target is not CONCAT else piece
            if piece.target is CONVERT:
                cast += nbytes
            if piece.target is _aten.full.default:
                continue
            in_place = codegen == "inductor" and _writes_in_place(piece, pack.target is CONCAT)
            written, reduce = (written + nbytes, reduce) if in_place else (written, reduce + nbytes)
    return Copies(gather, reduce, cast, written)


def _writes_in_place(piece: fx.Node, keeps_shape: bool) -> bool:
    """Whether the kernel that computes a piece can store it where it lies: pointwise kernels and reductions always,
    matmuls if the piece keeps its shape there."""
    if piece.op == "placeholder" or piece.target in _ALLOCATE or getattr(piece.target, "__name__", "") == "getitem":
        return False
    return keeps_shape or not emitted.is_heavy(piece)


def _is_reduced(pack: fx.Node) -> bool:
    return any(LAUNCHES.get(u.target) in ("reduce_scatter", "all_reduce") for u in pack.users)


def _unviewed(node: fx.Node) -> fx.Node:
    while node.target in (_aten.reshape.default, _aten.view.default, _aten.permute.default):
        node = source_of(node)
    return node


def _nbytes(node: fx.Node) -> int:
    return fake_of(node).nbytes
