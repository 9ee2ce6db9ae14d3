"""Small tools that the passes share: making nodes with their fake values, and moving nodes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_map_only

CONVERT = torch.ops.prims.convert_element_type.default

MARK = "fxshard"
"""Key of ``node.meta``: the name of the bucket whose collective the node is part of (cast, launch, wait, division)."""


def fake_of(node: fx.Node) -> Tensor:
    """The fake tensor that stands for the node's value. ``ValueError`` if the graph was not captured with them."""
    val = node.meta.get("val")
    if not isinstance(val, Tensor):
        raise ValueError(f"node {node.name} ({node.target}) has no fake value; capture the graph through AOTAutograd")
    return val


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new call node at the graph's insertion point, with its fake value computed from its arguments'."""
    node = graph.call_function(target, args, kwargs)
    with _fake_mode(graph):
        node.meta["val"] = target(*tree_map_only(fx.Node, fake_of, args), **kwargs)
    return node


def _fake_mode(graph: fx.Graph) -> AbstractContextManager[Any]:
    """The fake mode of the graph's values. Real values (graphs made by hand) compute as they are."""
    vals = (n.meta.get("val") for n in graph.nodes)
    return next((v.fake_mode for v in vals if isinstance(v, FakeTensor)), nullcontext())


def mark(name: str, node: fx.Node) -> fx.Node:
    """Say that a node is part of a bucket's collective; returns the node."""
    node.meta[MARK] = name
    return node


def convert(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The node's value in ``dtype``; the node itself where it has that dtype."""
    return node if fake_of(node).dtype == dtype else call(graph, CONVERT, node, dtype)


def move_before(place: fx.Node, nodes: Iterable[fx.Node]) -> None:
    """Move ``nodes``, in their order, to just before ``place``, which is none of them."""
    for node in nodes:
        place.prepend(node)


def move_after(place: fx.Node, nodes: Iterable[fx.Node]) -> None:
    """Move ``nodes``, in their order, to just after ``place``, which is none of them."""
    for node in nodes:
        place.append(node)
        place = node
