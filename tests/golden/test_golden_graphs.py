"""The plans and schedules of ordinary models are what the golden files say, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from golden_files import Golden
from models import GPT2, ConvNet, Llama, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from fxshard.inspect.record import Recorder


@dataclass(frozen=True)
class Case:
    name: str
    model: Any
    inputs: Any
    world: int
    reshard: bool = True
    bf16: bool = False

    @property
    def title(self) -> str:
        said = [self.name, f"world {self.world}", "reshard" if self.reshard else "keep"]
        return " · ".join([*said, *(["bf16 gathers, f32 reduction"] if self.bf16 else []), "prefetch 1"])

    @property
    def file(self) -> str:
        kind = ["keep"] * (not self.reshard) + ["bf16"] * self.bf16
        return "-".join([self.name, f"world{self.world}", *kind])


def gpt2() -> nn.Module:
    return GPT2(width=192, blocks=2, heads=4, vocab=64)


def llama() -> nn.Module:
    return Llama(width=128, blocks=3, heads=8, kv_heads=2, hidden=352, vocab=128)


def conv() -> nn.Module:
    return ConvNet()


def tied() -> nn.Module:
    return GPT2(width=64, blocks=2, tied=True)


def text() -> Tensor:
    return tokens(1, 8)


def images() -> Tensor:
    return torch.zeros(1, 3, 16, 16)


MODELS = {"gpt2": (gpt2, text), "llama": (llama, text), "conv": (conv, images), "tied": (tied, text)}
CASES = [
    *(Case(name, *MODELS[name], world) for name in MODELS for world in (2, 8, 1024)),
    *(Case(name, *MODELS[name], 8, reshard=False) for name in MODELS),
    *(Case(name, *MODELS[name], 8, bf16=True) for name in MODELS),
]


@pytest.fixture(scope="module")
def golden() -> Iterator[Golden]:
    yield Golden()


def record(case: Case) -> Recorder:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (case.world,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.bf16 else MixedPrecisionPolicy()
    model = fxshard.shard(case.model(), mesh, reshard_after_forward=case.reshard, mp_policy=policy)
    recorder = Recorder({"codegen": "eager"})
    torch.compile(model, backend=recorder, fullgraph=True)(case.inputs()).sum().backward()
    return recorder


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.file)
def test_plan_and_schedule_are_the_golden_ones(case: Case, golden: Golden, fake_world: Any) -> None:
    with fake_world(case.world):
        recorder = record(case)
    golden.check(f"{case.file}.plan.txt", recorder.plan_text(case.title))
    golden.check(f"{case.file}.schedule.txt", recorder.schedule_text(case.title))


@pytest.mark.parametrize("rank", [1, 1023])
def test_the_text_is_the_same_on_every_rank(rank: int, golden: Golden, fake_world: Any) -> None:
    case = next(c for c in CASES if c.name == "conv" and c.world == 1024)
    with fake_world(case.world, rank):
        recorder = record(case)
    golden.check(f"{case.file}.plan.txt", recorder.plan_text(case.title))
    golden.check(f"{case.file}.schedule.txt", recorder.schedule_text(case.title))


def test_no_golden_is_orphaned(golden: Golden) -> None:
    golden.asked |= {f"{c.file}.{kind}.txt" for c in CASES for kind in ("plan", "schedule")}
    assert golden.orphans() == []
