"""Random small models: trees of layers with shared modules, tied and frozen weights, several dtypes and units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard

WIDTH, WORDS = 6, 9
T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]
"""Picks one of a sequence: `random.choice`, or a draw of hypothesis."""


@dataclass(frozen=True)
class Layer:
    """`like` is the number of an earlier layer whose module (relation `share`) or weight (`tie`) this one has."""

    kind: str
    hidden: int
    dtype: torch.dtype
    frozen: str  # nothing, weight, all
    like: int | None = None
    relation: str = ""


@dataclass(frozen=True)
class Block:
    """`unit`: is sharded as a unit of its own; `policy`: bf16 gathers with fp32 reduction."""

    children: tuple[Layer | Block, ...]
    unit: bool
    reshard: bool
    policy: bool


def random_spec(choose: Choose[Any], layers: int = 4) -> Block:
    """A tree of up to ``layers`` layers; the root is a unit."""
    known: list[Layer] = []

    def layer() -> Layer:
        if known and choose([False, False, True]):
            like = choose(range(len(known)))
            made = Layer(*known[like].__dict__.values())
            made = Layer(made.kind, made.hidden, made.dtype, made.frozen, like, choose(["share", "tie"]))
        else:
            kind = choose(["linear", "mlp", "norm", "embedding"])
            dtype = choose([torch.float32, torch.float32, torch.float64])
            made = Layer(kind, choose([1, 3, 8]), dtype, choose(["nothing", "nothing", "weight", "all"]))
        known.append(made)
        return made

    def block(depth: int) -> Block:
        children: list[Layer | Block] = []
        for _ in range(choose([1, 2, 3])):
            if depth < 2 and choose([True, False]):
                children.append(block(depth + 1))
            elif len(known) < layers:
                children.append(layer())
        unit = depth == 0 or choose([True, True, False])
        return Block(tuple(children or [layer()]), unit, choose([True, True, False]), choose([False, False, True]))

    return block(0)


class _Layer(nn.Module):
    """`weight` and `other`, in any role; computes in the dtype of its weight."""

    def __init__(self, spec: Layer) -> None:
        super().__init__()
        self.kind = spec.kind
        shapes = {
            "linear": ((WIDTH, WIDTH), (WIDTH,)),
            "mlp": ((spec.hidden, WIDTH), (WIDTH, spec.hidden)),
            "norm": ((WIDTH,), (WIDTH,)),
            "embedding": ((WORDS, WIDTH), (WIDTH,)),
        }[spec.kind]
        self.weight, self.other = (nn.Parameter(torch.randn(s, dtype=spec.dtype) / 2) for s in shapes)
        self.weight.requires_grad_(spec.frozen == "nothing")
        self.other.requires_grad_(spec.frozen != "all")

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        w = self.weight
        y, other = x.to(w.dtype), self.other.to(w.dtype)  # a tied weight has the dtypes of the unit that took it
        if self.kind == "linear":
            y = F.linear(y, w, other).tanh()
        elif self.kind == "mlp":
            y = y + F.linear(F.relu(F.linear(y, w)), other)
        elif self.kind == "norm":
            y = F.layer_norm(y, (WIDTH,), w, other)
        else:
            y = y + F.embedding(words, w) * other
        return y.to(x.dtype)


class _Block(nn.Module):
    def __init__(self, children: Sequence[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(children)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        for child in self.inner:
            x = child(x, words)
        return x


def build(spec: Block, mesh: DeviceMesh | None = None, seed: int = 0) -> nn.Module:
    """The model, sharded."""
    torch.manual_seed(seed)
    made: list[_Layer] = []
    units: list[tuple[_Block, Block]] = []

    def module(child: Layer | Block) -> nn.Module:
        if isinstance(child, Block):
            block = _Block([module(c) for c in child.children])
            if child.unit:
                units.append((block, child))  # inner ones first
            return block
        if child.like is not None and child.relation == "share":
            layer = made[child.like]
        else:
            layer = _Layer(child)
            if child.like is not None:
                layer.weight = made[child.like].weight
        made.append(layer)
        return layer

    model = module(spec)
    for unit, of in units:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if of.policy else MixedPrecisionPolicy()
        if getattr(unit, "_fxshard_unit", None) is None:
            fxshard.fully_shard(unit, mesh=mesh, reshard_after_forward=of.reshard, mp_policy=policy)
    return model


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    """Rows that want a gradient, and words."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(4, WIDTH, generator=random, requires_grad=True), torch.randint(0, WORDS, (4,), generator=random)


def named_grads(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """This rank's rows of every parameter's gradient."""
    for name, p in model.named_parameters():
        yield name, None if p.grad is None else p.grad._local_tensor
