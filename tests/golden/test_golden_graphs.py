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
    reshard: bool | int = True
    bf16: bool = False
    replicas: int = 1
    stage: str = "sync"  # or what a micro-batch without synchronisation does: wait, park; join: synchronise after that
    layout: str = ""  # mixed dtypes, experts on groups of 4 ranks, norms that are replicated

    @property
    def title(self) -> str:
        reshard = "reshard" if self.reshard is True else f"reshard to {self.reshard} ranks" if self.reshard else "keep"
        said = [self.name, f"world {self.world}", reshard]
        said += ["bf16 gathers, f32 reduction"] * self.bf16 + [f"{self.replicas} replicas"] * (self.replicas > 1)
        return " · ".join([*said, *filter(None, [_STAGES[self.stage], _LAYOUTS[self.layout]]), "prefetch 1"])

    @property
    def file(self) -> str:
        kind = ["keep"] if not self.reshard else [] if self.reshard is True else [f"reshard{self.reshard}"]
        kind += ["bf16"] * self.bf16 + ["hsdp"] * (self.replicas > 1)
        kind += [self.stage] * (self.stage != "sync") + [self.layout] * bool(self.layout)
        return "-".join([self.name, f"world{self.world}", *kind])

    def shard(self) -> nn.Module:
        """The model, sharded over the fake world, with the flags of a micro-batch set."""
        torch.manual_seed(0)
        shape = (self.world,) if self.replicas == 1 else (self.replicas, self.world // self.replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = self.model()
        options: dict[str, Any] = {"reshard_after_forward": self.reshard}
        if self.bf16:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        norms = [m for m in model.modules() if isinstance(m, nn.RMSNorm)]
        if self.layout == "mixed":
            model.to(torch.bfloat16)
            for norm in norms:
                norm.float()
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        elif self.layout == "replicated":
            options["replicate_params"] = {p for norm in norms for p in norm.parameters()}
        elif self.layout == "experts":
            group = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("replicate", "expert"))
            for block in model.blocks:  # type: ignore[union-attr]
                fxshard.fully_shard(block.experts, mesh=group)  # type: ignore[union-attr]
        sharded: Any = fxshard.shard(model, mesh, **options)
        if self.stage in ("wait", "join"):
            sharded.set_requires_gradient_sync(False)
        if self.stage == "join":
            sharded.set_requires_gradient_sync(True)
        sharded.set_requires_all_reduce(self.stage != "park")
        return sharded


_STAGES = {
    "sync": "",
    "wait": "gradients not reduced",
    "park": "gradients reduced over shards",
    "join": "with gradients that waited",
}
_LAYOUTS = {
    "": "",
    "mixed": "norms in f32, the rest in bf16",
    "experts": "experts over groups of 4",
    "replicated": "norms replicated",
}


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


class Mixture(nn.Module):
    """Blocks with a dense layer and experts that are mixed by a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixtureBlock() for _ in range(2))
        self.head = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(8, 32, 64))
        self.down = nn.Parameter(torch.zeros(8, 64, 32))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        hidden = torch.relu(torch.einsum("td,edh->eth", x, self.up))
        return torch.einsum("eth,ehd,te->td", hidden, self.down, weights)


class MixtureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 8)
        self.dense = nn.Linear(32, 32)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(x)
        return x + self.experts(x, self.router(x).softmax(-1))


def rows() -> Tensor:
    return torch.zeros(4, 32)


MODELS = {"gpt2": (gpt2, text), "llama": (llama, text), "conv": (conv, images), "tied": (tied, text)}
CASES = [
    *(Case(name, *MODELS[name], world) for name in MODELS for world in (2, 8, 1024)),
    *(Case(name, *MODELS[name], 8, reshard=False) for name in MODELS),
    *(Case(name, *MODELS[name], 8, bf16=True) for name in MODELS),
    Case("llama", llama, text, 8, replicas=2),
    Case("llama", llama, text, 8, replicas=2, stage="park"),
    Case("llama", llama, text, 8, replicas=2, stage="join"),
    Case("llama", llama, text, 8, reshard=2),
    Case("llama", llama, text, 8, stage="wait"),
    Case("llama", llama, text, 8, layout="mixed"),
    Case("llama", llama, text, 8, layout="replicated"),
    Case("llama", llama, text, 8, replicas=2, layout="replicated"),
    Case("mixture", Mixture, rows, 8, layout="experts"),
]


@pytest.fixture(scope="module")
def golden() -> Iterator[Golden]:
    yield Golden()


def record(case: Case) -> Recorder:
    model = case.shard()
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
