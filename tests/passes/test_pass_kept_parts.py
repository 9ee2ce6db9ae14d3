"""Units that reshard to a number of ranks: forward keeps a part of what it gathers, backward gathers from the parts."""

from __future__ import annotations

import pytest
import torch
from pass_graphs import BF16, Sketch, finished, param, planned, sharded, text
from torch.utils.checkpoint import CheckpointPolicy

from fxshard.bucket import ParamBucket
from fxshard.cost import plan_wire_bytes
from fxshard.passes import bucket_all_gather, tag_reshard
from fxshard.passes.rewrite import fake_of
from fxshard.passes.verify import VerifyError, verify
from fxshard.plan import Plan

RECOMPUTE, SAVE = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE


pytestmark = pytest.mark.usefixtures("four_ranks")


def pair() -> dict[str, ParamBucket]:
    return sharded(reshard=2, a=[param(4, 4), param(4)])


def test_joint_reads_come_from_one_part_that_is_saved() -> None:
    g = Sketch(pair(), x=(2, 4))
    gm = g.output(g.add(g.mm(g.x, g.permute(g.gather("a", 0), [1, 0])), g.gather("a", 1)))
    tag_reshard.run(gm)
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert list(zip(text(gm), [n.meta.get("recompute") for n in calls], strict=True)) == [
        ("keep_part a", SAVE),
        ("gather_part a 0", RECOMPUTE),
        ("permute", RECOMPUTE),
        ("mm", None),
        ("gather_part a 1", RECOMPUTE),
        ("add", None),
    ]


@pytest.mark.parametrize("ranks", [True, False, 4, 1])
def test_nothing_is_kept_in_parts_unless_asked(ranks: bool | int) -> None:
    g = Sketch(sharded(reshard=ranks, a=[param(4, 4)]), x=(2, 4))
    gm = g.output(g.mm(g.x, g.gather("a", 0)))
    tag_reshard.run(gm)
    assert text(gm) == ["gather a 0", "mm"]


def test_forward_has_the_whole_and_takes_its_part_behind_the_last_use() -> None:
    g = Sketch(pair(), x=(2, 4))
    part = g.keep_part("a", 2)
    y = g.add(g.mm(g.x, g.permute(g.gather_part(part, "a", 0, 2), [1, 0])), g.gather_part(part, "a", 1, 2))
    gm, plan = finished(g.output(g.relu(y), part))
    read = ["slice", "view", "slice", "permute", "mm", "add"]
    assert text(gm) == ["all_gather a", "wait a", *read, "take_part", "relu"]
    assert [c.ranks for c in plan.gathers] == [4]


def test_a_part_that_backward_does_not_need_is_not_taken() -> None:
    g = Sketch(pair(), x=(2, 4))
    gm, _ = finished(g.output(g.mm(g.x, g.gather_part(g.keep_part("a", 2), "a", 0, 2))))
    assert "take_part" not in text(gm)


def backward(buckets: dict[str, ParamBucket]) -> torch.fx.GraphModule:
    [bucket] = buckets.values()
    part = torch.empty(bucket.layout.size // 2, dtype=bucket.dtypes.gather)
    g = Sketch(buckets, grad=torch.empty(2, 4, dtype=bucket.dtypes.gather), part=part)
    return g.output(g.mm(g.grad, g.gather_part(g.part, "a", 0, 2)))


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
def test_backward_gathers_the_parts_of_those_ranks(policy: object) -> None:
    buckets = sharded(reshard=2, policy=policy, a=[param(4, 4), param(4)])  # type: ignore[arg-type]
    gm, plan = finished(backward(buckets), "backward")
    assert text(gm) == ["all_gather a", "wait a", "slice", "view", "mm"]  # no cast: parts are in the gather dtype
    launch = next(n for n in gm.graph.nodes if n.op == "call_function")
    size, dtype = buckets["a"].layout.size, buckets["a"].dtypes.gather
    assert (launch.args[1], fake_of(launch.args[0]).numel(), fake_of(launch).numel()) == (2, size // 2, size)
    assert launch.args[2] == buckets["a"].kept_part.group  # type: ignore[union-attr]
    assert plan_wire_bytes(plan) == size * dtype.itemsize // 2  # of two ranks, each sends its half
    assert Plan.from_json(plan.to_json()) == plan


def test_complex_parts_travel_as_pairs_of_reals() -> None:
    buckets = sharded(reshard=2, a=[param(4, 4, dtype=torch.complex64)])
    gm, _ = finished(backward(buckets), "backward")
    around = ["view_as_real", "view", "all_gather a", "wait a", "view", "view_as_complex"]
    assert text(gm)[: len(around)] == around


def test_over_another_number_of_ranks_than_planned_is_an_error() -> None:
    gm = backward(pair())
    plan, buckets = planned(gm, "backward")
    bucket_all_gather.run(gm, plan, buckets)
    launch = next(n for n in gm.graph.nodes if n.op == "call_function")
    launch.args = (launch.args[0], 4, launch.args[2])
    with pytest.raises(VerifyError, match="is over 4 ranks, but the plan's is over 2"):
        verify(gm, plan, after=bucket_all_gather.NAME)
