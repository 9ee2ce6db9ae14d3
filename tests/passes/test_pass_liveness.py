"""peak_bytes: what is gathered and in flight at most, for schedules whose answer can be counted by hand."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from broken_graphs import layers
from models import Llama, tokens
from pass_graphs import BF16, Sketch, backward, finished, forward, param, sharded
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard import capture
from fxshard.inspect import schedule
from fxshard.inspect.record import Recorder
from fxshard.inspect.schedule import Step
from fxshard.passes.liveness import aliases, lifetimes, peak_bytes
from fxshard.passes.rewrite import call
from fxshard.passes.schedule_overlap import WAIT
from fxshard.plan import Plan

SIZE = 24 * 4
"""Bytes of the gathered buffer of one of `layers`: 4×4 and 4 elements, and 4 of padding."""


@pytest.mark.parametrize("prefetch", range(7))
def test_equal_layers_used_once_need_one_buffer_more_than_are_prefetched(two_ranks: None, prefetch: int) -> None:
    gm, plan = finished(forward(layers("abcde")), prefetch=prefetch)
    assert peak_bytes(gm.graph, plan) == (min(prefetch + 1, 5) * SIZE, 0)


def test_gathered_buffers_have_the_gather_dtype(two_ranks: None) -> None:
    g = Sketch(layers("a", policy=BF16), x=torch.empty(4, 4, dtype=torch.bfloat16))
    gm, plan = finished(g.output(g.mm(g.x, g.gather("a", 0))))
    assert peak_bytes(gm.graph, plan) == (SIZE // 2, 0)


def test_a_parameter_that_is_read_again_is_kept_until_then(two_ranks: None) -> None:
    g = Sketch(layers("abc"), x=(4, 4))
    tied = g.gather("a", 0)
    x = g.mm(g.mm(g.mm(g.x, tied), g.gather("b", 0)), g.gather("c", 0))
    gm, plan = finished(g.output(g.mm(x, g.permute(tied, [1, 0]))))
    assert peak_bytes(gm.graph, plan) == (3 * SIZE, 0)


def test_a_view_of_a_view_keeps_the_buffer_and_a_copy_does_not(two_ranks: None) -> None:
    def peak(form: str) -> tuple[int, int]:
        g = Sketch(layers("ab"), x=(4, 4))
        weight = g.gather("a", 0)
        kept = g.select(g.unsqueeze(weight, 0), 0, 0) if form == "view" else g.clone(weight)
        x = g.relu(g.mm(g.x, g.gather("b", 0)))
        gm, plan = finished(g.output(g.mm(x, kept)), prefetch=0)
        return peak_bytes(gm.graph, plan)

    assert peak("view") == (2 * SIZE, 0)
    assert peak("copy") == (SIZE, 0)


def test_what_is_returned_lives_to_the_end(two_ranks: None) -> None:
    g = Sketch(layers("abc", reshard=False), x=(4, 4))
    weights = [g.gather(name, 0) for name in "abc"]
    x = g.mm(g.mm(g.mm(g.x, weights[0]), weights[1]), weights[2])
    gm, plan = finished(g.output(x, *weights))
    assert peak_bytes(gm.graph, plan) == (3 * SIZE, 0)


def test_one_unit_is_reduced_at_a_time(two_ranks: None) -> None:
    gm, plan = finished(backward(layers("abcd")), "backward")
    assert peak_bytes(gm.graph, plan) == (2 * SIZE, SIZE + SIZE // 2)


def test_all_buckets_of_a_unit_are_in_flight_together(two_ranks: None) -> None:
    buckets = sharded(a=[param(4, 4), param(4, 4, dtype=torch.float64)])
    g = Sketch(buckets, x=(4, 4), y=torch.empty(4, 4, dtype=torch.float64))
    gm, plan = finished(g.output(g.reduce(g.relu(g.x), "a#0", 0), g.reduce(g.relu(g.y), "a#1", 0)), "backward")
    assert peak_bytes(gm.graph, plan) == (0, (16 + 8) * 4 + (16 + 8) * 8)


def test_replicas_are_summed_while_the_next_unit_is_reduced(fake_world: Any) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        g = Sketch(layers("abc", mesh=mesh), x=(4, 4))
        gm, plan = finished(g.output(*(g.reduce(g.mm(g.x, g.x), name, 0) for name in "cba")), "backward")
    scattered, summed = SIZE + SIZE // 2, SIZE // 2 + SIZE // 2
    assert peak_bytes(gm.graph, plan) == (0, scattered + summed)


def test_a_transformer_needs_two_layers_gathered_and_one_of_each_reduction_in_flight(
    fake_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks: dict[str, tuple[int, int]] = {}

    def steps_of(graph: fx.Graph, plan: Plan) -> list[Step]:
        peaks[plan.kind] = peak_bytes(graph, plan)
        return schedule.steps_of(graph, plan)

    monkeypatch.setattr(capture, "steps_of", steps_of)
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = fxshard.shard(Llama(width=24, blocks=5, heads=6, kv_heads=3, hidden=40, vocab=16), mesh)
        recorder = Recorder({"codegen": "eager"})
        torch.compile(model, backend=recorder, fullgraph=True)(tokens(1, 8, vocab=16)).sum().backward()
    [layer] = {b.layout.size * 4 for block in model.layers for b in block._fxshard_unit.buckets}  # type: ignore[union-attr]
    scattered, summed = layer + layer // 4, layer // 4 + layer // 4
    assert peaks == {"forward": (2 * layer, 0), "backward": (2 * layer, scattered + summed)}


def test_collectives_of_the_users_model_are_not_counted(two_ranks: None) -> None:
    g = Sketch(layers("a"), x=(4, 4))
    x = call(g.graph, WAIT, call(g.graph, torch.ops._c10d_functional.all_reduce.default, g.x, "sum", "0"))
    gm, plan = finished(g.output(g.mm(x, g.gather("a", 0))))
    assert [life.bucket for life in lifetimes(gm.graph, plan)] == ["a"]
    assert peak_bytes(gm.graph, plan) == (SIZE, 0)


def test_aliases_are_views_of_a_first_argument_and_behind_the_wait_only_if_asked() -> None:
    g = Sketch({}, x=(4, 4))
    parts = g.split(g.x, 2)
    part = g.graph.call_function(operator.getitem, (parts, 0))
    part.meta["val"] = parts.meta["val"][0]
    waited = call(g.graph, WAIT, g.x)
    turned = g.permute(waited, [1, 0])
    of_another = g.view_as(g.neg(part), part)
    assert aliases(g.x) == [g.x, parts, waited, part, turned]
    assert aliases(g.x, waited=False) == [g.x, parts, part]
    assert of_another in part.users
