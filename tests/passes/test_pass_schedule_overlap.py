"""schedule_overlap: launches early, waits late, in the order of the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_graphs import BF16, Sketch, backward, finished, forward, param, planned, scheduled, sharded, text
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxshard import _torch
from fxshard.bucket import ParamBucket
from fxshard.passes import bucket_all_gather, schedule_overlap

SHOWN = ("all_gather", "reduce_scatter", "all_reduce", "wait", "mm", "div")


def layers(names: str, mesh: DeviceMesh | None = None, **options: Any) -> dict[str, ParamBucket]:
    return sharded(mesh, **options, **{name: [param(4, 4)] for name in names})


def lines(said: str) -> list[str]:
    """`"ag a, wait a, mm"` as `text` says it."""
    long = {"ag": "all_gather", "rs": "reduce_scatter", "ar": "all_reduce"}
    return [" ".join(long.get(word, word) for word in line.split()) for line in said.split(",")]


@pytest.mark.parametrize(
    ("prefetch", "order"),
    [
        (0, "ag a, wait a, mm, ag b, wait b, mm, ag c, wait c, mm, ag d, wait d, mm"),
        (1, "ag a, wait a, ag b, mm, wait b, ag c, mm, wait c, ag d, mm, wait d, mm"),
        (2, "ag a, ag b, wait a, ag c, mm, wait b, ag d, mm, wait c, mm, wait d, mm"),
        (9, "ag a, ag b, ag c, ag d, wait a, mm, wait b, mm, wait c, mm, wait d, mm"),
    ],
)
def test_gathers_are_launched_as_many_layers_ahead_as_asked(two_ranks: None, prefetch: int, order: str) -> None:
    gm, _ = finished(forward(layers("abcd")), prefetch=prefetch)
    assert text(gm, only=SHOWN) == lines(order)


def test_launches_already_in_order_stay(two_ranks: None) -> None:
    gm = forward(layers("abc"))
    plan, buckets = planned(gm)
    bucket_all_gather.run(gm, plan, buckets)
    assert schedule_overlap.run(gm, plan).modified
    before = list(gm.graph.nodes)
    assert not schedule_overlap.run(gm, plan).modified
    assert list(gm.graph.nodes) == before


def test_one_layer_has_nothing_to_overlap_with(two_ranks: None) -> None:
    gm = forward(layers("a"))
    plan, buckets = planned(gm)
    bucket_all_gather.run(gm, plan, buckets)
    assert not schedule_overlap.run(gm, plan).modified


def test_the_cast_goes_with_the_launch(two_ranks: None) -> None:
    g = Sketch(layers("ab", policy=BF16), x=torch.empty(4, 4, dtype=torch.bfloat16))
    gm = g.output(g.mm(g.mm(g.x, g.gather("a", 0)), g.gather("b", 0)))
    wanted = ["convert_element_type", "all_gather a", "wait a", "convert_element_type", "all_gather b"]
    assert text(scheduled(gm))[:5] == wanted


def test_all_buckets_of_a_unit_are_launched_when_the_unit_before_is_complete(two_ranks: None) -> None:
    buckets = sharded(**{name: [param(4, 4), param(4, 4, frozen=True)] for name in "ab"})
    gm, _ = finished(forward(buckets))
    order = "ag a#0, ag a#1, wait a#0, mm, wait a#1, ag b#0, ag b#1, mm, wait b#0, mm, wait b#1, mm"
    assert text(gm, only=SHOWN) == lines(order)


def test_a_unit_whose_buckets_are_used_apart_is_gathered_in_parts(two_ranks: None) -> None:
    buckets = sharded(a=[param(4, 4), param(4, 4, frozen=True)], b=[param(4, 4)], c=[param(4, 4)])
    apart = {name: buckets[name] for name in ("a#0", "b", "c", "a#1")}
    gm, _ = finished(forward(apart))
    order = "ag a#0, wait a#0, ag b, mm, wait b, ag c, mm, wait c, ag a#1, mm, wait a#1, mm"
    assert text(gm, only=SHOWN) == lines(order)


def test_gradients_of_a_unit_are_reduced_in_parts_where_they_are_made_apart(two_ranks: None) -> None:
    buckets = sharded(a=[param(4, 4), param(4, 4, dtype=torch.float64)], b=[param(4, 4)])
    g = Sketch(buckets, x=(4, 4), y=torch.empty(4, 4, dtype=torch.float64))
    last = g.reduce(g.mm(g.y, g.y), "a#1", 0), g.reduce(g.mm(g.x, g.x), "b", 0)
    gm, _ = finished(g.output(*last, g.reduce(g.mm(g.x, g.x), "a#0", 0)), "backward")
    order = "mm, rs a#1, mm, wait a#1, div, rs b, mm, wait b, div, rs a#0, wait a#0, div"
    assert text(gm, only=SHOWN) == lines(order)


def test_reductions_are_waited_for_when_the_next_ones_are_ready(two_ranks: None) -> None:
    gm, _ = finished(backward(layers("abc")), "backward", prefetch=0)
    first = "mm, rs c, ag c, wait c, mm, mm, wait c, div, rs b, ag b, wait b, mm, mm, wait b, div, rs a"
    assert text(gm, only=SHOWN) == lines(f"{first}, ag a, wait a, mm, wait a, div")


def test_replicas_are_summed_while_the_next_unit_is_reduced_and_the_one_after_computed(fake_world: Any) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        g = Sketch(layers("abcd", mesh), x=(4, 4))
        gm, _ = finished(g.output(*(g.reduce(g.mm(g.x, g.x), name, 0) for name in "dcba")), "backward")
    order = (
        "mm, rs d, mm, wait d, div, ar d, rs c, mm, wait d, div, wait c, div, ar c, rs b,"
        "mm, wait c, div, wait b, div, ar b, rs a, wait b, div, wait a, div, ar a, wait a, div"
    )
    assert text(gm, only=SHOWN) == lines(order)


def test_without_shards_replicas_are_summed_right_after_the_last_gradient(fake_world: Any) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        g = Sketch(layers("ab", mesh), x=(4, 4))
        gm, _ = finished(g.output(*(g.reduce(g.mm(g.x, g.x), name, 0) for name in "ba")), "backward")
    assert text(gm, only=SHOWN) == lines("mm, ar b, mm, wait b, div, ar a, wait a, div")


@pytest.mark.parametrize(("replicas", "stages"), [(1, "wait {0}, div"), (2, "wait {0}, div, ar {0}, wait {0}, div")])
def test_with_nothing_in_flight_every_wait_is_at_its_launch(fake_world: Any, replicas: int, stages: str) -> None:
    with fake_world(2 * replicas):
        mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replicate", "shard"))
        gm, _ = finished(backward(layers("abc", mesh)), "backward", prefetch=0, in_flight=0)
    order = ", ".join(f"mm, rs {u}, {stages.format(u)}, ag {u}, wait {u}, mm" for u in "cba")
    assert text(gm, only=SHOWN) == lines(order)


def test_two_units_reductions_may_be_in_flight_if_asked_for(two_ranks: None) -> None:
    g = Sketch(layers("abcd"), x=(4, 4))
    gm, _ = finished(g.output(*(g.reduce(g.mm(g.x, g.x), name, 0) for name in "dcba")), "backward", in_flight=2)
    order = "mm, rs d, mm, rs c, mm, wait d, div, rs b, mm, wait c, div, rs a, wait b, div, wait a, div"
    assert text(gm, only=SHOWN) == lines(order)


def test_units_on_meshes_of_different_sizes_wait_for_what_is_communicated(two_ranks: None) -> None:
    alone = sharded(_torch.mesh_of_one("cpu"), b=[param(4, 4)])
    both = layers("ac")
    buckets = {"a": both["a"], "b": alone["b"], "c": both["c"]}
    gm, _ = finished(forward(buckets))
    assert text(gm, only=SHOWN) == lines("ag a, wait a, ag c, mm, mm, wait c, mm")
    gm, _ = finished(backward(buckets), "backward", prefetch=0)
    order = "mm, rs c, ag c, wait c, mm, mm, mm, mm, wait c, div, rs a, ag a, wait a, mm, wait a, div"
    assert text(gm, only=SHOWN) == lines(order)


@pytest.mark.parametrize("replicas", [1, 2])
def test_where_the_next_units_reductions_were_left_alone_the_one_after_counts(fake_world: Any, replicas: int) -> None:
    with fake_world(2 * replicas):
        mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replicate", "shard"))
        g = Sketch(layers("abc", mesh), x=(4, 4))
        shares = [g.reduce(g.mm(g.x, g.x), name, 0) for name in "cb"]
        twice = g.reduce(g.mm(g.x, g.x), "b", 0)
        gm, _ = finished(g.output(shares[0], g.relu(shares[1]), twice, g.reduce(g.mm(g.x, g.x), "a", 0)), "backward")
    rest = ", div, ar {0}, wait {0}, div" if replicas > 1 else ", div"
    first, last = (f"wait {name}{rest.format(name)}" for name in "ca")
    assert text(gm, only=SHOWN) == lines(f"mm, rs c, mm, mm, mm, {first}, rs a, {last}")


def test_a_wait_is_never_moved_behind_who_reads_it(two_ranks: None) -> None:
    g = Sketch(layers("ab"), x=(4, 4))
    share = g.reduce(g.mm(g.x, g.x), "b", 0)
    used = g.mul(share, g.sum(g.x))
    gm, _ = finished(g.output(used, g.reduce(g.mm(g.x, g.x), "a", 0)), "backward")
    assert text(gm, only=(*SHOWN, "mul")) == lines("mm, rs b, wait b, div, mul, mm, rs a, wait a, div")
