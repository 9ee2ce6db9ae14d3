"""From a spec to a model, and from a model to a sharded one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fuzz_layers import Adapted
from fuzz_spec import Block, Layer, Spec
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.placement import BlockAtomic, TensorAtomic


class Tree(nn.Module):
    """A block of a spec: runs its children one after another, or some of them, or twice.

    ``now`` is the number of the step as an attribute, set before a step's first forward; ``step`` is the same as an
    argument, ``flag`` a tensor () that says by its sign which way to go, alike on all ranks.
    """

    def __init__(self, block: Block, parts: list[nn.Module]) -> None:
        super().__init__()
        self.block, self.now = block, 0
        self.names = [f"part{i}" for i in range(len(parts))]
        if block.container == "attributes":
            for name, part in zip(self.names, parts, strict=True):
                self.add_module(name, part)
        elif block.container == "dict":
            self.parts = nn.ModuleDict(dict(zip(self.names, parts, strict=True)))
        else:
            self.parts = nn.Sequential(*parts) if block.container == "sequential" else nn.ModuleList(parts)

    def listed(self) -> list[Any]:
        if self.block.container == "attributes":
            return [getattr(self, name) for name in self.names]
        return list(self.parts.values() if self.block.container == "dict" else self.parts)

    def chain(self, x: Tensor, ids: Tensor, step: int, flag: Tensor) -> Tensor:
        for part in self.listed():
            x = part(x, ids, step, flag)
        return x

    def forward(self, x: Tensor, ids: Tensor, step: int, flag: Tensor) -> Tensor:
        run = self.block.run
        given = (ids, step, flag)
        if run == "residual":
            return x + self.chain(x, *given)
        if run == "twice":
            return self.chain(torch.tanh(self.chain(x, *given)), *given)
        if run == "by_step":
            return self.chain(x, *given) if self.now % 2 == 0 else x
        if run == "by_step_argument":
            return self.chain(x, *given) if step % 2 == 1 else x
        if run == "by_flag":
            return self.chain(x, *given) if bool(flag > 0) else x
        if run == "in_turn":
            parts = self.listed()
            return parts[self.now % len(parts)](x, *given)
        if run.startswith("checkpoint"):
            return checkpoint(self.chain, x, *given, use_reentrant=run == "checkpoint_reentrant")
        return self.chain(x, *given)


def build(spec: Spec, seed: int) -> nn.Module:
    """The plain model, initialised by ``seed``; its ties and frozen parameters are those of the spec."""
    torch.manual_seed(seed)
    made: dict[int, Adapted] = {}

    def module_of(part: Layer | Block) -> nn.Module:
        if isinstance(part, Block):
            return Tree(part, [module_of(child) for child in part.children])
        if part.share in made:
            made[part.number] = made[part.share]
            return made[part.share]
        adapted = made[part.number] = Adapted(part, getattr(torch, part.dtype or spec.dtype))
        if part.tie in made:
            _tie(made[part.tie], adapted)
        return adapted

    model = module_of(spec.root)
    for layer in spec.layers:
        params = list(made[layer.number].parameters())
        for p in params if layer.frozen == "all" else params[:1] if layer.frozen == "first" else ():
            p.requires_grad_(False)
    return model


def _tie(first: nn.Module, second: nn.Module) -> None:
    """Let the first parameter of ``second`` that ``first`` has one like be that one."""
    for owner in second.modules():
        for name, p in list(owner._parameters.items()):
            for q in first.parameters():
                if p is not None and p is not q and p.ndim > 1 and (p.shape, p.dtype) == (q.shape, q.dtype):
                    setattr(owner, name, q)
                    return


def shard(model: nn.Module, spec: Spec, mesh: DeviceMesh) -> None:
    """Shard ``model`` in place, in the units of the spec."""
    placement = _placements(model, spec) if spec.placements else None
    shards = mesh.size(mesh.ndim - 1)
    in_pairs = spec.pairs and shards > 2 and shards % 2 == 0

    def kept(reshard: bool | None) -> bool | int | None:
        return 2 if reshard and in_pairs else reshard

    if spec.units == "auto":
        fxshard.shard(model, mesh, reshard_after_forward=kept(spec.reshard) or False, shard_placement_fn=placement)
        return
    done: set[int] = set()
    for unit, reshard in _units(model, spec):
        new = [m for m in unit if id(m) not in done]  # a module that stands in two places is sharded once
        if new:
            done |= {id(m) for m in new}
            fxshard.fully_shard(
                new if len(new) > 1 else new[0],
                mesh=mesh,
                reshard_after_forward=kept(reshard),
                shard_placement_fn=placement,
            )
    fxshard.fully_shard(
        model, mesh=mesh, reshard_after_forward=kept(spec.root.reshard), shard_placement_fn=placement
    )


def _units(model: nn.Module, spec: Spec) -> Iterator[tuple[list[nn.Module], bool | None]]:
    """Modules that make a unit each, inner ones first, without the root."""
    trees = [m for m in model.modules() if isinstance(m, Tree)]
    for tree in reversed(trees):
        if spec.units == "blocks" and tree.block.unit and tree is not model:
            yield [tree], tree.block.reshard
        if spec.units == "lists":
            parts = tree.listed()
            for i in range(0, len(parts), 2):
                yield list(dict.fromkeys(parts[i : i + 2])), tree.block.reshard


def _placements(model: nn.Module, spec: Spec) -> Callable[[nn.Parameter], Shard | None]:
    rng = random.Random(spec.seed)
    chosen: dict[int, Shard | None] = {}
    for p in model.parameters():
        asked: list[Shard | None] = [None, TensorAtomic(), *(Shard(k) for k in range(p.ndim))]
        asked += [BlockAtomic(n) for n in (2, 3) if p.shape[0] and p.shape[0] % n == 0]
        chosen[id(p)] = rng.choice(asked)
    return lambda p: chosen[id(p)]
