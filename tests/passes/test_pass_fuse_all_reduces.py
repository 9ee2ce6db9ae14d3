"""fuse_all_reduces: reductions stay one per parameter, but for one all-reduce a bucket over the replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_graphs import BF16, Sketch, param, sharded, text
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from fxshard.bucket import ParamBucket
from fxshard.passes import fuse_all_reduces
from fxshard.passes.rewrite import fake_of
from fxshard.passes.verify import verify

pytestmark = pytest.mark.usefixtures("four_ranks")


def hybrid(policy: Any = None, **units: Any) -> dict[str, ParamBucket]:
    return sharded(init_device_mesh("cpu", (2, 2)), policy=policy, **units)


def sketch(buckets: dict[str, ParamBucket]) -> tuple[Sketch, fx.Node, fx.Node]:
    g = Sketch(buckets, y=(4, 4), z=(4,))
    return g, g.reduce(g.y, "a", 0), g.reduce(g.z, "a", 1)


def fused(gm: fx.GraphModule) -> list[str]:
    modified = fuse_all_reduces.run(gm).modified
    gm.graph.lint()
    verify(gm)
    assert modified == ("all_reduce a" in text(gm))
    return text(gm)


PAIR = [(4, 4), (4,)]
CHAIN = ["constant_pad_nd", "all_reduce a", "wait a", "slice", "div"]


def test_the_shares_of_a_bucket_are_all_reduced_as_one_buffer() -> None:
    g, first, second = sketch(hybrid(a=[param(*s) for s in PAIR]))
    assert fused(g.output(g.add(first, second))) == ["scatter_grad", "scatter_grad", "add", *CHAIN]


def test_its_wait_comes_at_the_end() -> None:
    g, first, second = sketch(hybrid(a=[param(*s) for s in PAIR]))
    gm = g.output(g.add(first, second), g.relu(g.y))
    assert fused(gm)[3:] == [*CHAIN[:2], "relu", *CHAIN[2:]]


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "stored in fp32, gathered in bf16"])
def test_the_buffer_is_a_multiple_of_512_bytes_and_only_behind_the_segment(policy: Any) -> None:
    buckets = hybrid(policy, a=[param(*s) for s in PAIR])
    g, first, second = sketch(buckets)
    gm = g.output(g.add(first, second))
    fused(gm)
    launch = next(n for n in gm.graph.nodes if n.name.startswith("all_reduce"))
    pad = launch.args[0]
    assert fake_of(launch).nbytes % 512 == 0 and fake_of(launch).dtype == torch.float32
    assert fake_of(launch).numel() - buckets["a"].segment_size == pad.args[1][1] < 512 // 4
    assert pad.args[1][0] == 0 and pad.args[2] == 0
    [out] = gm.graph.output_node().args[0]
    assert fake_of(out).numel() == buckets["a"].segment_size


def test_a_buffer_that_is_such_a_multiple_is_not_padded() -> None:
    g = Sketch(hybrid(a=[param(16, 16)]), y=(16, 16))
    assert fused(g.output(g.reduce(g.y, "a", 0))) == ["scatter_grad", "all_reduce a", "wait a", "div"]
    assert [fuse_all_reduces.padding_of(n, torch.bfloat16) for n in (0, 1, 255, 256, 257)] == [0, 255, 1, 0, 255]


def test_without_replicas_nothing_is_fused() -> None:
    g, first, second = sketch(sharded(a=[param(*s) for s in PAIR]))
    assert fused(g.output(g.add(first, second))) == ["reduce a 0", "reduce a 1", "add"]


def test_shares_that_are_not_one_sum_are_left_alone() -> None:
    g, first, second = sketch(hybrid(a=[param(*s) for s in PAIR]))
    assert fused(g.output(first, second)) == ["reduce a 0", "reduce a 1"]


@pytest.mark.parametrize("stage", ["shard", "none"])
def test_gradients_that_wait_are_left_alone(stage: str) -> None:
    g, first, _ = sketch(hybrid(a=[param(*s) for s in PAIR]))
    first.args = (*first.args, stage)
    gm = g.output(first)
    assert not fuse_all_reduces.run(gm).modified
