"""Unit: modules whose parameters are gathered together, and what holds for all of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fxshard.bucket import ParamBucket, ParamSlot
from fxshard.reduction import Stage
from fxshard.scope import Scope


@dataclass(eq=False)
class Unit:
    """``modules`` run as one gather window; ``buckets`` hold the parameters that no inner unit holds."""

    modules: tuple[nn.Module, ...]
    buckets: list[ParamBucket]
    reshard_after_forward: bool
    policy: MixedPrecisionPolicy
    scope: Scope
    reshard_size: int | None = None  # ranks that share what is kept of that after forward; None: all that shard it
    reshard_by_default: bool = False  # the user left it open: True for inner units, False for the outermost
    name: str = ""
    reduces: bool = True  # backward reduces gradients; else they wait, see fxshard.unreduced
    all_reduces: bool = True  # the second stage of that too
    main_grads: bool = False  # reduced gradients stay in the reduce dtype, in ``main_grad`` instead of ``.grad``
    reduce_op: str = "avg"  # one of fxshard.reduction.OPS
    divide_factor: float | None = None  # in place of the number of ranks
    scale: Tensor | None = None  # 0 dims: multiplies packed gradients before they are reduced
    forward_prefetch: tuple[Unit, ...] = ()  # gathered ahead by eager code, when this unit is gathered in forward
    backward_prefetch: tuple[Unit, ...] = ()  # the same in backward
    _ran: set[int] = field(default_factory=set)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """Its settings come first: its buckets read them while they are copied."""
        twin = memo[id(self)] = copy.copy(self)
        twin._ran = set()
        twin.scale = copy.deepcopy(self.scale, memo)
        twin.scope = copy.deepcopy(self.scope, memo)
        twin.buckets = copy.deepcopy(self.buckets, memo)
        twin.modules = copy.deepcopy(self.modules, memo)
        return twin

    @property
    def stage(self) -> Stage:
        """How far backward reduces gradients."""
        if not self.reduces or not self.all_reduces:
            return "shard" if self.reduces else "none"
        return "main" if self.main_grads else "all"

    def ran(self, module: nn.Module) -> bool:
        """Note that one of the modules finished its forward; True when all have, and the window may close."""
        self._ran.add(id(module))
        if len(self._ran) < len(self.modules):
            return False
        self._ran.clear()
        return True

    def set_stage(self, reduces: bool, all_reduces: bool) -> None:
        """Say how far backward reduces. The first time that it is not all the way, compiled graphs get sinks."""
        self.reduces, self.all_reduces = reduces, all_reduces
        if not (reduces and all_reduces):
            for bucket in self.buckets:
                if not bucket.unreduced.may_wait:
                    bucket.unreduced.make_sinks(("none", "shard"))
                    bucket.set_reduction(self.reduce_op, self.divide_factor)

    def set_reshard(self, after_forward: bool, size: int | None = None) -> None:
        """Change what is kept after forward; graphs that keep something else are not used any more."""
        self.reshard_by_default = False
        if (after_forward, size) != (self.reshard_after_forward, self.reshard_size):
            self.reshard_after_forward, self.reshard_size = after_forward, size
            for bucket in self.buckets:
                bucket.take_new_key()

    def set_reduction(self, op: str, divide_factor: float | None) -> None:
        """Change what divides gradients; graphs that hold another division are not used any more."""
        if (op, divide_factor) != (self.reduce_op, self.divide_factor):
            self.reduce_op, self.divide_factor = op, divide_factor
            for bucket in self.buckets:
                bucket.set_reduction(op, divide_factor)

    def set_scale(self, factor: Any) -> None:
        """Take a factor as it is now; a new value does not change the tensor that graphs read."""
        if factor is None:
            self.scale = None
            return
        if self.scale is None:
            self.scale = torch.ones((), dtype=torch.float32, device=self.buckets[0].device if self.buckets else None)
        self.scale.copy_(factor.detach().reshape(())) if isinstance(factor, Tensor) else self.scale.fill_(factor)


@dataclass(frozen=True, eq=False)
class ParamRead:
    """What one property of a sharded module reads."""

    unit: Unit
    bucket: ParamBucket
    index: int

    @property
    def slot(self) -> ParamSlot:
        return self.bucket.slots[self.index]


def units_of(module: Any, recurse: bool = True) -> list[Unit]:
    """The units of a module and, with ``recurse``, of the modules inside it, outermost first, each once."""
    modules = module.modules() if recurse else [module]
    return list(dict.fromkeys(u for m in modules if (u := getattr(m, "_fxshard_unit", None)) is not None))
