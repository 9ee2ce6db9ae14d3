"""bucket_reduce_scatter: one reduce-scatter a bucket, right after its last gradient, or a refusal that says why not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import Sketch, param, planned, sharded, text
from torch import fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fxshard.passes import bucket_reduce_scatter
from fxshard.passes.bucket_reduce_scatter import Refusal
from fxshard.passes.verify import verify


def merged(gm: fx.GraphModule) -> list[str]:
    plan, buckets = planned(gm, "backward")
    assert bucket_reduce_scatter.run(gm, plan, buckets).modified
    gm.graph.lint()
    verify(gm, plan, after=bucket_reduce_scatter.NAME)
    return text(gm)


def two_gradients(**options: Any) -> Sketch:
    return Sketch(sharded(**options, a=[param(4, 4), param(4)]), x=(4, 4), y=(4,))


def test_shares_become_one_pack_one_reduce_scatter_and_one_division(two_ranks: None) -> None:
    g = two_gradients()
    shares = g.reduce(g.relu(g.x), "a", 0), g.reduce(g.relu(g.y), "a", 1)
    gm = g.output(g.add(*shares))
    assert merged(gm) == ["relu", "relu", "pack a [0, 1]", "reduce_scatter a", "wait a", "div"]
    assert next(n for n in gm.graph.nodes if n.name.startswith("div")).args[1] == 2.0


def test_they_stand_right_after_the_last_gradient(two_ranks: None) -> None:
    g = two_gradients()
    weight, bias = g.relu(g.x), g.relu(g.y)
    later = g.mm(g.x, weight)
    gm = g.output(later, g.add(g.reduce(bias, "a", 1), g.reduce(weight, "a", 0)))
    assert merged(gm) == ["relu", "relu", "pack a [0, 1]", "reduce_scatter a", "wait a", "div", "mm"]


def test_gradients_that_backward_is_given_are_packed_after_all_inputs(two_ranks: None) -> None:
    g = two_gradients()
    gm = g.output(g.reduce(g.x, "a", 0), g.relu(g.y))
    assert merged(gm) == ["pack a [0]", "reduce_scatter a", "wait a", "div", "relu"]
    ops = [n.op for n in gm.graph.nodes]
    assert ops == sorted(ops, key=["placeholder", "call_function", "output"].index)


def test_several_gradients_of_one_parameter_are_packed_together(two_ranks: None) -> None:
    g = two_gradients()
    shares = [g.reduce(g.relu(g.x), "a", 0), g.reduce(g.neg(g.x), "a", 0), g.reduce(g.relu(g.y), "a", 1)]
    gm = g.output(g.add(shares[2], g.add(shares[0], shares[1])))
    assert "pack a [0, 0, 1]" in merged(gm)


def test_a_share_that_is_added_several_times_is_packed_as_often(two_ranks: None) -> None:
    """Equal gradients of one parameter, used in several places, are one node in the graph."""
    g = two_gradients()
    one, two = g.reduce(g.relu(g.x), "a", 0), g.reduce(g.relu(g.y), "a", 1)
    gm = g.output(g.add(g.add(one, one), g.add(two, one)))
    assert merged(gm) == ["relu", "relu", "pack a [0, 0, 0, 1]", "reduce_scatter a", "wait a", "div"]


def test_a_sum_that_goes_into_something_else_is_merged_all_the_same(two_ranks: None) -> None:
    buckets = sharded(a=[param(4, 4), param(4)])
    g = Sketch(buckets, x=(4, 4), y=(4,), flat_like=buckets["a"].flat)
    total = g.add(g.reduce(g.relu(g.x), "a", 0), g.reduce(g.relu(g.y), "a", 1))
    gm = g.output(g.add(total, g.flat_like))
    assert merged(gm) == ["relu", "relu", "pack a [0, 1]", "reduce_scatter a", "wait a", "div", "add"]


def test_reductions_of_different_buckets_are_not_merged(two_ranks: None) -> None:
    g = Sketch(sharded(a=[param(4, 4)], b=[param(4, 4)]), x=(4, 4))
    gm = g.output(g.reduce(g.relu(g.x), "b", 0), g.reduce(g.neg(g.x), "a", 0))
    each = ["pack {0} [0]", "reduce_scatter {0}", "wait {0}", "div"]
    assert merged(gm) == ["relu", *(s.format("b") for s in each), "neg", *(s.format("a") for s in each)]


def test_buckets_that_share_their_last_gradient_are_launched_in_the_order_of_the_plan(two_ranks: None) -> None:
    g = Sketch(sharded(a=[param(4, 4)], b=[param(4, 4)], c=[param(4, 4)]), x=(4, 4))
    grad = g.relu(g.x)
    gm = g.output(*(g.reduce(grad, name, 0) for name in "cab"))
    assert [line for line in merged(gm) if line.startswith("reduce")] == [f"reduce_scatter {n}" for n in "abc"]


@pytest.mark.parametrize(
    ("reduce", "tail"),
    [(torch.float32, ["div"]), (torch.bfloat16, ["div", "convert_element_type"])],
)
def test_the_segment_is_cast_after_the_division_where_storage_has_another_dtype(
    two_ranks: None, reduce: torch.dtype, tail: list[str]
) -> None:
    buckets = sharded(policy=MixedPrecisionPolicy(torch.bfloat16, reduce), a=[param(4, 4)])
    g = Sketch(buckets, x=torch.empty(4, 4, dtype=torch.bfloat16))
    assert merged(g.output(g.reduce(g.x, "a", 0))) == ["pack a [0]", "reduce_scatter a", "wait a", *tail]


def test_complex_gradients_travel_as_pairs_of_reals(two_ranks: None) -> None:
    g = Sketch(sharded(a=[param(4, dtype=torch.complex64)]), y=torch.empty(4, dtype=torch.complex64))
    around = ["view_as_real", "view", "reduce_scatter a", "wait a", "view", "view_as_complex", "div"]
    assert merged(g.output(g.reduce(g.neg(g.y), "a", 0))) == ["neg", "pack a [0]", *around]


@pytest.mark.parametrize(
    ("shape", "stages"),
    [
        ((2, 2), ["reduce_scatter a", "wait a", "div", "all_reduce a", "wait a", "div"]),
        ((4, 1), ["all_reduce a", "wait a", "div"]),
        ((1, 4), ["reduce_scatter a", "wait a", "div"]),
    ],
)
def test_each_stage_is_a_sum_and_a_division_and_a_dim_of_one_rank_has_no_collective(
    fake_world: Any, shape: tuple[int, int], stages: list[str]
) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        g = two_gradients(mesh=mesh)
        gm = g.output(g.reduce(g.relu(g.x), "a", 0))
        assert merged(gm) == ["relu", "pack a [0]", *stages]
    divisors = [n.args[1] for n in gm.graph.nodes if n.name.startswith("div")]
    assert math.prod(divisors) == 4.0


def also_returned(g: Sketch, one: fx.Node, two: fx.Node) -> tuple[fx.Node, ...]:
    return g.add(one, two), one


def mixed_with_something_else(g: Sketch, one: fx.Node, two: fx.Node) -> tuple[fx.Node, ...]:
    return (g.add(g.add(one, g.flat_like), two),)


def scaled(g: Sketch, one: fx.Node, two: fx.Node) -> tuple[fx.Node, ...]:
    return (g.add(one, two, alpha=2),)


def not_added(g: Sketch, one: fx.Node, two: fx.Node) -> tuple[fx.Node, ...]:
    return g.relu(one), g.relu(two)


@pytest.mark.parametrize("use", [also_returned, mixed_with_something_else, scaled, not_added])
def test_shares_that_are_used_otherwise_than_in_one_sum_are_refused(
    two_ranks: None, use: Callable[..., tuple[fx.Node, ...]]
) -> None:
    buckets = sharded(a=[param(4, 4), param(4)])
    g = Sketch(buckets, x=(4, 4), y=(4,), flat_like=buckets["a"].flat)
    gm = g.output(*use(g, g.reduce(g.relu(g.x), "a", 0), g.reduce(g.relu(g.y), "a", 1)))
    before = text(gm)
    plan, names = planned(gm, "backward")
    assert not bucket_reduce_scatter.run(gm, plan, names).modified
    assert text(gm) == before
    because = "its parameters' shares are used by something else than one sum of them all"
    assert gm.meta["fxshard_refusals"] == [Refusal("a", buckets["a"].key, because)]
    verify(gm, plan, after=bucket_reduce_scatter.NAME)


def test_a_refused_bucket_does_not_keep_others_from_being_merged(two_ranks: None) -> None:
    g = Sketch(sharded(a=[param(4, 4)], b=[param(4, 4), param(4)]), x=(4, 4), y=(4,))
    one, two = g.reduce(g.relu(g.x), "b", 0), g.reduce(g.relu(g.y), "b", 1)
    gm = g.output(g.relu(one), g.relu(two), g.reduce(g.neg(g.x), "a", 0))
    assert {"reduce b 0", "reduce b 1", "reduce_scatter a"} < set(merged(gm))


def test_a_graph_without_gradients_is_left_alone(two_ranks: None) -> None:
    g = two_gradients()
    gm = g.output(g.relu(g.x))
    plan, buckets = planned(gm, "backward")
    assert not bucket_reduce_scatter.run(gm, plan, buckets).modified and text(gm) == ["relu"]
