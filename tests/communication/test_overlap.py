"""What overlaps changes no bit, and a step moves the bytes that its plans say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from micro_steps import Log, Net, answer, mesh_of, train
from ranks import RankPool
from torch.distributed.fsdp import CPUOffloadPolicy

import fxshard
from fxshard.cost import plan_wire_bytes
from fxshard.inspect.record import Recorder

STEPS = [["sync"]] * 2


def test_overlapped_and_waited_for_at_once_are_equal_bit_for_bit(ranks4: RankPool) -> None:
    overlapped = answer(ranks4.run(train, "fx", (2, 2), STEPS))
    waited = answer(ranks4.run(train, "fx-waiting", (2, 2), STEPS))
    waited.compare(overlapped, tolerance=0)


def one_form(form: str) -> Any:
    return train(form, (2, 2), [["wait", "sync"], ["park", "sync"]], log=True)


def test_all_reduces_alone_can_be_fused(ranks4: RankPool) -> None:
    """One reduce-scatter a parameter, one all-reduce a bucket on a buffer of a multiple of 512 bytes: same numbers."""
    fused, unfused, between = (answer(ranks4.run(one_form, f)) for f in ("fx", "fx-unfused", "fx-all-reduces"))
    fused.compare(between)
    unfused.compare(between)
    reduced = Counter(op for op, _ in fused.logs[-1] if op != "all_gather")
    per_parameter = Counter(op for op, _ in between.logs[-1] if op != "all_gather")
    assert per_parameter["reduce_scatter"] > 2 * reduced["reduce_scatter"]
    aligned = [elements for op, elements in between.logs[-1] if op == "all_reduce" and elements * 4 % 512 == 0]
    assert len(aligned) == reduced["all_reduce"]


def sent(log: Log, shards: int, replicas: int) -> int:
    """Bytes that a rank sends for fp32 collectives of ring algorithms: S (n - 1) / n, for an all-reduce twice."""
    total = 0
    for op, elements in log:
        ranks, times = {
            "all_gather": (shards, shards),  # the input is one rank's part
            "reduce_scatter": (shards, 1),
            "all_reduce": (replicas, 2),
        }[op]
        total += 4 * elements * times * (ranks - 1) // ranks
    return total


def _train_and_log(shape: Sequence[int]) -> Any:
    return train("fx", shape, STEPS, log=True)


@pytest.mark.parametrize("shape", [pytest.param((4,), marks=pytest.mark.slow), (2, 2)], ids=str)
def test_a_step_sends_the_bytes_that_its_plans_say(ranks4: RankPool, fake_world: Any, shape: Sequence[int]) -> None:
    log = answer(ranks4.run(_train_and_log, shape)).logs[-1]
    with fake_world(4):
        recorder = Recorder({"codegen": "eager"})
        model = fxshard.shard(Net(), mesh_of(shape))
        torch.compile(model, backend=recorder, fullgraph=True)(torch.ones(4, 5)).sum().backward()
    planned = sum(plan_wire_bytes(plan) for capture in recorder.captures for plan in capture.plans.values())
    assert planned == sent(log, shape[-1], shape[0] if len(shape) == 2 else 1) > 0


@pytest.mark.parametrize("form", ("eager", "fx"))
def test_on_a_cpu_mesh_offloading_changes_nothing(ranks2: RankPool, form: str) -> None:
    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    resting = answer(ranks2.run(_train_with, form, policy))
    resting.compare(answer(ranks2.run(_train_with, form, {})), tolerance=0)


def _train_with(form: str, options: dict[str, Any]) -> Any:
    return train(form, (2,), [["sync"]] * 2, shard=options)
