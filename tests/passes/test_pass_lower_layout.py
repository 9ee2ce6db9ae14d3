"""lower_layout: views and packs become plain ATen at the layout's offsets, and no fxshard op is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_graphs import BF16, Sketch, param, planned, run, sharded, text
from torch import fx, nn
from torch.distributed.tensor import Shard

from fxshard.passes import bucket_all_gather, bucket_reduce_scatter, lower_layout

SHAPES = [(4, 4), (4,), (3, 2, 5), (0, 4), (7,)]


def cut_along(dim: int) -> Callable[[nn.Parameter], Shard | None]:
    """Along ``dim`` where there is one and something to cut."""
    return lambda p: Shard(dim) if p.ndim > dim and p.numel() else None


def views(gm: fx.GraphModule) -> fx.GraphModule:
    plan, buckets = planned(gm)
    bucket_all_gather.run(gm, plan, buckets)
    return gm


def packs(gm: fx.GraphModule) -> fx.GraphModule:
    plan, buckets = planned(gm, "backward")
    bucket_reduce_scatter.run(gm, plan, buckets)
    return gm


def lowered(gm: fx.GraphModule) -> fx.GraphModule:
    assert lower_layout.run(gm).modified
    gm.graph.lint()
    ops = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert not any(op.namespace == "fxshard" and op is not lower_layout.CONCAT for op in ops)
    return gm


@pytest.mark.parametrize("dim", [0, 1])
def test_views_read_each_parameter_where_it_lies_and_copy_nothing(dim: int) -> None:
    buckets = sharded(cut=cut_along(dim), a=[param(*shape) for shape in SHAPES])
    g = Sketch(buckets)
    gm = views(g.output(*(g.gather("a", i) for i in range(len(SHAPES)))))
    flat = torch.randn(buckets["a"].layout.size)
    before = run(gm, flat)
    for want, got, shape in zip(before, run(lowered(gm), flat), SHAPES, strict=True):
        assert torch.equal(want, got) and got.shape == shape
        assert got.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_a_parameter_that_fills_its_layout_is_not_sliced() -> None:
    g = Sketch(sharded(a=[param(4, 4)]))
    assert text(lowered(views(g.output(g.gather("a", 0))))) == ["view"]
    g = Sketch(sharded(a=[param(4)]))
    assert text(lowered(views(g.output(g.gather("a", 0))))) == []


def test_only_a_cut_along_a_later_dim_is_permuted() -> None:
    g = Sketch(sharded(cut=lambda p: Shard(p.ndim - 1), a=[param(4, 4), param(4)]))
    gm = lowered(views(g.output(g.gather("a", 0), g.gather("a", 1))))
    assert text(gm) == ["slice", "view", "permute", "slice"]


@pytest.mark.parametrize("dim", [0, 1])
def test_packed_gradients_lie_at_their_offsets_with_zeros_between(dim: int) -> None:
    buckets = sharded(cut=cut_along(dim), a=[param(*shape) for shape in SHAPES])
    layout = buckets["a"].layout
    g = Sketch(buckets, **{f"g{i}": shape for i, shape in enumerate(SHAPES)})
    shares = [g.reduce(getattr(g, f"g{i}"), "a", i) for i in (2, 0, 4, 3)]  # parameter 1 has no gradient
    gm = packs(g.output(g.add(g.add(*shares[:2]), g.add(*shares[2:]))))
    inputs = torch.empty(layout.size), *(torch.randn(shape) for shape in SHAPES)
    before, after = run(gm, *inputs)[0], run(lowered(gm), *inputs)[0]
    assert torch.equal(before, after) and after.shape == (layout.size,)
    held = torch.zeros(layout.size, dtype=torch.bool)
    for i in (0, 2, 4):
        at = layout.get_tensor_range(i)
        stored = inputs[1 + i].movedim(dim if len(SHAPES[i]) > dim else 0, 0)
        assert torch.equal(after[at.start : at.end].view(stored.shape), stored)
        held[at.start : at.end] = True
    assert not after[~held].any() and not held.all()


def test_gradients_of_a_parameter_used_twice_are_summed_in_the_reduce_dtype() -> None:
    buckets = sharded(policy=BF16, a=[param(1)])
    like = torch.empty(1, dtype=torch.bfloat16)
    g = Sketch(buckets, one=like, two=like)
    gm = lowered(packs(g.output(g.add(g.reduce(g.one, "a", 0), g.reduce(g.two, "a", 0)))))
    assert text(gm) == ["convert_element_type", "convert_element_type", "add", "concat"]
    small = 2.0**-9  # bf16 has 8 bits: 1 + 2^-9 is 1 there
    (got,) = run(gm, torch.empty(1), torch.ones(1, dtype=torch.bfloat16), torch.full((1,), small).bfloat16())
    assert got.item() == 1 + small


def test_gradients_of_the_reduce_dtype_are_not_cast() -> None:
    g = Sketch(sharded(a=[param(4, 4)]), x=(4, 4))
    assert text(lowered(packs(g.output(g.reduce(g.x, "a", 0))))) == ["concat"]


def test_a_graph_of_plain_ops_is_left_alone() -> None:
    g = Sketch({}, x=(4, 4))
    gm = g.output(g.relu(g.x))
    assert not lower_layout.run(gm).modified and text(gm) == ["relu"]
