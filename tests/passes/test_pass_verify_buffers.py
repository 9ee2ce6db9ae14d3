"""verify: collectives move the buckets' own buffers, and no more memory than was asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from broken_graphs import Break, backward_broken_by, call_before, forward_broken_by, launch, layers, message, node, wait
from pass_graphs import backward, finished, forward, planned, scheduled
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from fxshard.passes import lower_layout
from fxshard.passes.verify import verify

_aten = torch.ops.aten


# ---- what they move --------------------------------------------------------------------------------------------------


def half_of_the_flat_shard(gm: fx.GraphModule) -> None:
    gather = launch(gm, "all_gather", "b")
    gather.args = (call_before(gather, _aten.slice.Tensor, gather.args[0], 0, 0, 6), *gather.args[1:])


def other_dtype(gm: fx.GraphModule) -> None:
    gather = launch(gm, "all_gather", "b")
    gather.args = (call_before(gather, _aten.gt.Scalar, gather.args[0], 0), *gather.args[1:])


def other_group_size(gm: fx.GraphModule) -> None:
    gather = launch(gm, "all_gather", "b")
    gather.args = (gather.args[0], 4, gather.args[2])


def own_part_of_the_buffer(gm: fx.GraphModule) -> None:
    """As a rank would read the segment that it sent."""
    view = next(u for u in wait(gm, "all_gather", "b").users if u.target is _aten.slice.Tensor)
    view.args = (*view.args[:2], 0, 12)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (half_of_the_flat_shard, r"has an input of 6 torch.float32, but the bucket's segment is 12 torch.float32 on"),
        (other_dtype, r"has an input of 12 torch.bool, but the bucket's segment is 12 torch.float32 on"),
        (other_group_size, r"\(all_gather of bucket b\) is over 4 ranks, but the plan's is over 2; use"),
        (own_part_of_the_buffer, r"slice\w* reads a part of the gathered buffer of bucket b that is no parameter"),
    ],
)
def test_gathers_move_the_buckets_buffers_and_are_read_at_the_layouts_offsets(
    two_ranks: None, break_it: Break, said: str
) -> None:
    assert re.search(said, forward_broken_by(break_it))


def test_a_view_of_a_parameter_that_is_not_planned_is_found_before_lowering(two_ranks: None) -> None:
    gm = scheduled(forward(layers()))
    plan, _ = planned(forward(layers()))
    view = node(gm, lower_layout.VIEW)
    view.args = (*view.args[:2], 1)
    said = message(gm, plan, after="schedule_overlap")
    assert "is no parameter of the plan; read one of a.p0 at [0, 16)" in said


def packed_again(gm: fx.GraphModule, pieces: Callable[..., Any], offsets: Callable[..., Any]) -> None:
    concat = node(gm, lower_layout.CONCAT)
    grads, places, size = concat.args
    concat.args = (pieces(*grads), offsets(*places), size)  # type: ignore[misc]


def gradient_is_packed_twice(gm: fx.GraphModule) -> None:
    packed_again(gm, lambda g: [g, g], lambda at: [at, at])


def gradient_is_at_another_place(gm: fx.GraphModule) -> None:
    packed_again(gm, lambda g: [g], lambda at: [at + 8])


def gradient_is_left_out(gm: fx.GraphModule) -> None:
    packed_again(gm, lambda g: [], lambda at: [])


def gap_is_no_zeros(gm: fx.GraphModule) -> None:
    noise = call_before(node(gm, lower_layout.CONCAT), _aten.rand.default, [8])
    packed_again(gm, lambda g: [g, noise], lambda at: [at, 16])


@pytest.mark.parametrize(
    "break_it", [gradient_is_packed_twice, gradient_is_at_another_place, gradient_is_left_out, gap_is_no_zeros]
)
def test_every_planned_gradient_is_packed_once_at_its_offset_with_zeros_in_the_gaps(
    two_ranks: None, break_it: Break
) -> None:
    said = backward_broken_by(break_it)
    wanted = r"concat\w*, which reduce_scatter\w* \(.* of bucket c\) sums, has not every planned gradient once"
    assert re.search(wanted, said) and "pack c.p0 at [0, 16)" in said


def test_a_gradient_missing_from_a_pack_is_found_before_lowering(two_ranks: None) -> None:
    gm = scheduled(backward(layers()), "backward")
    plan, _ = planned(backward(layers()), "backward")
    pack = node(gm, lower_layout.PACK)
    pack.args = (*pack.args[:2], [1])
    assert "has not every planned gradient once" in message(gm, plan, after="schedule_overlap")


def test_replicas_sum_what_the_reduce_scatter_gives(fake_world: Any) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        gm, plan = finished(backward(layers("ab", mesh=mesh)), "backward")
    verify(gm, plan)
    summed = launch(gm, "all_reduce", "a")
    other = call_before(summed, _aten.neg.default, summed.args[0])
    summed.args = (other, *summed.args[1:])
    assert re.search(r"\(all_reduce of bucket a\) sums neg\w*, but has to sum what the bucket's", message(gm, plan))


# ---- memory ----------------------------------------------------------------------------------------------------------


def view_is_kept(gm: fx.GraphModule) -> None:
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    kept = call_before(output, _aten.select.int, next(iter(wait(gm, "all_gather", "b").users)), 0, 0)
    output.args = ((*output.args[0], kept),)  # type: ignore[misc]


def test_a_resharding_units_views_are_not_kept_for_backward(two_ranks: None) -> None:
    said = forward_broken_by(view_is_kept)
    assert re.search(r"select\w* is a view of the gathered buffer of bucket b and is kept for backward, though", said)
    assert "reshard_after_forward=False" in said


def test_a_unit_that_does_not_reshard_keeps_its_views(two_ranks: None) -> None:
    gm, plan = finished(forward(layers(reshard=False)))
    view_is_kept(gm)
    verify(gm, plan)


def test_backward_and_inference_return_what_they_like(two_ranks: None) -> None:
    for kind in ("backward", "inference"):
        gm, plan = finished(forward(layers()), kind)
        view_is_kept(gm)
        verify(gm, plan)


def earlier(gm: fx.GraphModule) -> None:
    wait(gm, "all_gather", "a").append(launch(gm, "all_gather", "c"))
    wait(gm, "all_gather", "a").append(launch(gm, "all_gather", "b"))


@pytest.mark.parametrize("prefetch", [0, 1])
def test_no_more_units_are_gathered_ahead_than_asked(two_ranks: None, prefetch: int) -> None:
    said = forward_broken_by(earlier, prefetch)
    assert re.search(
        r"when all_gather\w* \(all_gather of bucket c\) is launched, all_gathers of 2 units are launched and not "
        rf"waited for \(b 96 bytes, c 96 bytes\), but prefetch {prefetch} allows 1; launch it later or wait for",
        said,
    )


def test_a_larger_prefetch_allows_it(two_ranks: None) -> None:
    gm, _ = finished(forward(layers()))
    earlier(gm)
    _, plan = finished(forward(layers()), prefetch=2)
    verify(gm, plan)


def test_one_unit_is_reduced_at_a_time(two_ranks: None) -> None:
    def reduced_later(gm: fx.GraphModule) -> None:
        waited = wait(gm, "reduce_scatter", "c")
        for moved in (next(iter(waited.users)), waited):
            launch(gm, "reduce_scatter", "b").append(moved)

    said = backward_broken_by(reduced_later)
    assert re.search(r"\(reduce_scatter of bucket b\) is launched, reduce_scatters of 2 units are launched", said)
    assert "(c 144 bytes, b 144 bytes), but in_flight 1 allows 1" in said
