"""bucket_all_gather: one all-gather a bucket, at the first use of any member."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_graphs import BF16, Sketch, param, planned, sharded, text
from torch import fx

from fxshard.passes import bucket_all_gather
from fxshard.passes.verify import verify

pytestmark = pytest.mark.usefixtures("two_ranks")


def merged(gm: fx.GraphModule) -> list[str]:
    plan, buckets = planned(gm)
    assert bucket_all_gather.run(gm, plan, buckets).modified
    gm.graph.lint()
    verify(gm, plan, after=bucket_all_gather.NAME)
    return text(gm)


def linear(g: Sketch, name: str, x: fx.Node) -> fx.Node:
    weight, bias = g.gather(name, 0), g.gather(name, 1)
    return g.add(g.mm(x, weight), bias)


def test_the_gathers_of_one_bucket_become_one_all_gather_and_views() -> None:
    g = Sketch(sharded(a=[param(4, 4), param(4)]), x=(2, 4))
    assert merged(g.output(linear(g, "a", g.x))) == ["all_gather a", "wait a", "view a 0", "view a 1", "mm", "add"]


def test_they_stand_at_the_first_use_of_any_member_not_at_its_read() -> None:
    g = Sketch(sharded(a=[param(4, 4), param(4)]), x=(2, 4))
    weight, bias = g.gather("a", 0), g.gather("a", 1)
    gm = g.output(g.mm(g.add(g.relu(g.x), bias), weight))
    assert merged(gm) == ["relu", "all_gather a", "wait a", "view a 0", "view a 1", "add", "mm"]


def test_repeated_reads_and_tied_weights_become_one_view() -> None:
    g = Sketch(sharded(a=[param(4, 4)]), x=(2, 4))
    gm = g.output(g.mm(g.mm(g.x, g.gather("a", 0)), g.gather("a", 0)))
    assert merged(gm) == ["all_gather a", "wait a", "view a 0", "mm", "mm"]


def test_gathers_of_different_buckets_are_not_merged() -> None:
    g = Sketch(sharded(a=[param(4, 4), param(4)], b=[param(4, 4), param(4)]), x=(2, 4))
    gm = g.output(linear(g, "b", linear(g, "a", g.x)))
    each = ["view {0} 0", "view {0} 1", "mm", "add"]
    assert merged(gm) == [s.format(n) for n in "ab" for s in ["all_gather {0}", "wait {0}", *each]]


@pytest.mark.parametrize("other", [{"frozen": True}, {"dtype": torch.float64}])
def test_frozen_parameters_and_other_dtypes_have_a_bucket_and_a_gather_of_their_own(other: Any) -> None:
    g = Sketch(sharded(a=[param(4, 4), param(4, **other)]), x=(2, 4))
    gm = g.output(g.add(g.mm(g.x, g.gather("a#0", 0)), g.gather("a#1", 0)))
    assert [line for line in merged(gm) if line.startswith("all_gather")] == ["all_gather a#0", "all_gather a#1"]


def test_gathers_of_one_first_use_are_launched_in_the_order_of_the_plan() -> None:
    g = Sketch(sharded(b=[param(4)], a=[param(4)]))
    gm = g.output(g.add(g.gather("b", 0), g.gather("a", 0)))
    assert merged(gm) == ["all_gather a", "wait a", "view a 0", "all_gather b", "wait b", "view b 0", "add"]


def test_a_read_that_nobody_uses_is_gathered_where_it_is_read() -> None:
    g = Sketch(sharded(a=[param(4, 4)]), x=(2, 4))
    before = g.relu(g.x)
    g.gather("a", 0)
    assert merged(g.output(g.relu(before))) == ["relu", "all_gather a", "wait a", "view a 0", "relu"]


def test_the_same_dtype_is_not_cast() -> None:
    g = Sketch(sharded(a=[param(4, 4)]), x=(2, 4))
    assert "convert_element_type" not in merged(g.output(g.mm(g.x, g.gather("a", 0))))


def test_the_flat_shard_is_cast_once_before_it_is_gathered() -> None:
    g = Sketch(sharded(policy=BF16, a=[param(4, 4), param(4)]), x=torch.empty(2, 4, dtype=torch.bfloat16))
    gm = g.output(linear(g, "a", g.x))
    assert merged(gm)[:3] == ["convert_element_type", "all_gather a", "wait a"]


def test_complex_parameters_travel_as_pairs_of_reals() -> None:
    g = Sketch(sharded(a=[param(4, dtype=torch.complex64)]))
    gm = g.output(g.mul(g.gather("a", 0), g.gather("a", 0)))
    around = ["view_as_real", "view", "all_gather a", "wait a", "view", "view_as_complex"]
    assert merged(gm) == [*around, "view a 0", "mul"]


def test_a_graph_that_reads_no_parameter_is_left_alone() -> None:
    g = Sketch(sharded(a=[param(4, 4)]), x=(2, 4))
    gm = g.output(g.relu(g.x))
    plan, buckets = planned(gm)
    assert not bucket_all_gather.run(gm, plan, buckets).modified and text(gm) == ["relu"]
