"""On one rank graphs run as they are: after all passes they compute what the captured graph does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_graphs import BF16, Sketch, finished, param, run, sharded, text
from torch import fx
from torch.distributed.tensor import Shard


def layer(g: Sketch, name: str, x: fx.Node) -> fx.Node:
    return g.relu(g.add(g.mm(x, g.gather(name, 0)), g.gather(name, 1)))


OPTIONS: list[dict[str, Any]] = [{}, {"policy": BF16}, {"cut": lambda p: Shard(p.ndim - 1)}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "bf16", "columns"])
def test_a_forward_reads_the_same_parameters(options: dict[str, Any]) -> None:
    buckets = sharded(**options, a=[param(4, 6), param(6)], b=[param(6, 4), param(4)])
    dtype = torch.bfloat16 if "policy" in options else torch.float32
    g = Sketch(buckets, x=torch.empty(3, 4, dtype=dtype))
    x = layer(g, "b", layer(g, "a", g.x))
    gm = g.output(g.mm(x, g.gather("a", 0)))  # a weight that is used twice
    inputs = *(torch.randn_like(b.flat.detach()) for b in buckets.values()), torch.randn(3, 4, dtype=dtype)
    (before,) = run(gm, *inputs)
    gm, _ = finished(gm)
    assert not text(gm, only=["gather", "all_gather", "wait", "view a", "view b"])
    assert torch.equal(run(gm, *inputs)[0], before)


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "bf16", "columns"])
def test_a_backward_gives_the_same_flat_gradients(options: dict[str, Any]) -> None:
    buckets = sharded(**options, a=[param(4, 6), param(6)], b=[param(6, 4)])
    dtype = torch.bfloat16 if "policy" in options else torch.float32
    g = Sketch(buckets, x=torch.empty(4, 6, dtype=dtype), y=torch.empty(6, dtype=dtype))
    shares = [g.reduce(g.relu(g.y), "a", 1), g.reduce(g.relu(g.x), "a", 0), g.reduce(g.neg(g.x), "a", 0)]
    gm = g.output(g.reduce(g.permute(g.x, [1, 0]), "b", 0), g.add(g.add(*shares[:2]), shares[2]))
    inputs = torch.empty(0), torch.empty(0), torch.randn(4, 6, dtype=dtype), torch.randn(6, dtype=dtype)
    before = run(gm, *inputs)
    gm, _ = finished(gm, "backward")
    assert not text(gm, only=["reduce", "reduce_scatter", "all_reduce", "wait", "pack", "div"])
    after = run(gm, *inputs)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_refused_bucket_gives_the_same_gradients_one_share_at_a_time() -> None:
    buckets = sharded(a=[param(4, 6), param(6)], b=[param(6, 4)])
    g = Sketch(buckets, x=(4, 6), y=(6,))
    one, two = g.reduce(g.relu(g.x), "a", 0), g.reduce(g.relu(g.y), "a", 1)
    gm = g.output(g.add(one, two), g.relu(one), g.reduce(g.permute(g.x, [1, 0]), "b", 0))
    inputs = torch.empty(0), torch.empty(0), torch.randn(4, 6), torch.randn(6)
    before = run(gm, *inputs)
    gm, _ = finished(gm, "backward")
    assert text(gm, only=["reduce"]) == ["reduce a 0", "reduce a 1"]
    torch.testing.assert_close(run(gm, *inputs), before, rtol=0, atol=0)
