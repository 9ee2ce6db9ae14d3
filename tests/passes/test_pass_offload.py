"""Copies to and from a flat shard that rests elsewhere are nodes around its collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pass_graphs import Sketch, finished, param, sharded, text
from torch import nn

from fxshard.bucket import ParamBucket


@pytest.fixture
def offloaded(fake_world: Any) -> Iterator[dict[str, ParamBucket]]:
    """A bucket that rests on the CPU and computes elsewhere; the meta device stands for an accelerator."""
    with fake_world(2):
        buckets = sharded(a=[param(4, 4)])
        for bucket in buckets.values():
            bucket.offloaded_from = torch.device("meta")
            bucket.set_reduction()
        yield buckets


def test_a_gather_copies_its_input_in(offloaded: dict[str, ParamBucket]) -> None:
    g = Sketch(offloaded, x=torch.empty(4, 4, device="meta"))
    gm, _ = finished(g.output(g.mm(g.x, g.gather("a", 0))))
    assert text(gm) == ["_to_copy", "all_gather a", "wait a", "view", "mm"]
    moved = next(n for n in gm.graph.nodes if n.target is torch.ops.aten._to_copy.default)
    assert moved.args[0].meta["val"].device.type == "cpu" and moved.kwargs["device"].type == "meta"


def test_a_reduction_copies_its_output_out(offloaded: dict[str, ParamBucket]) -> None:
    g = Sketch(offloaded, x=torch.empty(4, 4, device="meta"))
    gm, _ = finished(g.output(g.reduce(g.mm(g.x, g.x), "a", 0)), "backward")
    assert text(gm) == ["mm", "concat", "reduce_scatter a", "wait a", "div", "_to_copy"]
    moved = next(n for n in gm.graph.nodes if n.target is torch.ops.aten._to_copy.default)
    assert moved.kwargs["device"].type == "cpu"


def test_shards_that_left_the_cpu_are_named(offloaded: dict[str, ParamBucket]) -> None:
    (bucket,) = offloaded.values()
    bucket.slots[0].name = "layer.weight"
    bucket.offloaded_from = torch.device("cpu")
    bucket.refresh()
    bucket.offloaded_from, bucket.flat = torch.device("cuda"), _Elsewhere(bucket.flat)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"parameters 'layer.weight' are on cuda:0, but .* CPUOffloadPolicy"):
        bucket.refresh()


class _Elsewhere:
    """A flat shard that says it is on a GPU."""

    def __init__(self, flat: nn.Parameter) -> None:
        self.device, self.is_meta, self._flat = torch.device("cuda:0"), False, flat

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flat, name)
