"""Unit: modules whose parameters are gathered together; and what fxshard's modules can do beyond ``nn.Module``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fxshard.bucket import ParamBucket, ParamSlot
from fxshard.scope import Scope


@dataclass(eq=False)
class Unit:
    """``modules`` run as one gather window; ``buckets`` hold the parameters that no inner unit holds."""

    modules: tuple[nn.Module, ...]
    buckets: list[ParamBucket]
    reshard_after_forward: bool
    policy: MixedPrecisionPolicy
    scope: Scope
    reshard_by_default: bool = False  # the user left it open: True for inner units, False for the outermost
    name: str = ""
    reduces: bool = True  # backward reduces gradients; else they wait, see fxshard.unreduced
    all_reduces: bool = True  # on a (replicate, shard) mesh: the second stage of that too
    _ran: set[int] = field(default_factory=set)

    def ran(self, module: nn.Module) -> bool:
        """Note that one of the modules finished its forward; True when all have, and the window may close."""
        self._ran.add(id(module))
        if len(self._ran) < len(self.modules):
            return False
        self._ran.clear()
        return True

    def set_reduces(self, reduces: bool, all_reduces: bool) -> None:
        self.reduces, self.all_reduces = reduces, all_reduces
        if not (reduces and all_reduces):
            for bucket in self.buckets:
                bucket.unreduced.make_sinks()


@dataclass(frozen=True, eq=False)
class ParamRead:
    """What one property of a sharded module reads."""

    unit: Unit
    bucket: ParamBucket
    index: int

    @property
    def slot(self) -> ParamSlot:
        return self.bucket.slots[self.index]


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns; the parameters are gathered already."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


class ShardedModule:
    """Mixed into the class of every module that fxshard changed: units' own modules and owners of parameters.

    The methods are those of ``torch.distributed.fsdp.FSDPModule``, with the same meaning.
    """

    _fxshard_unit: Unit | None = None
    _fxshard_reads: dict[str, ParamRead]

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed after forward and gathered again for backward, from the next call on."""
        _check_flag("reshard_after_forward", reshard_after_forward)
        for unit in units_of(self, recurse):
            unit.reshard_after_forward = reshard_after_forward
            unit.reshard_by_default = False

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over ranks. While it does not, they accumulate in full on each rank, and
        the first backward that does reduces the sum. Set it before forward and backward of a micro-batch."""
        _check_flag("requires_gradient_sync", requires_gradient_sync)
        for unit in units_of(self, recurse):
            unit.set_reduces(requires_gradient_sync, requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a (replicate, shard) mesh, whether backward reduces gradients over the replicas. While it does not,
        segments reduced over the shard dim accumulate on each rank, and the first backward that does reduces them."""
        _check_flag("requires_all_reduce", requires_all_reduce)
        for unit in units_of(self, recurse):
            unit.set_reduces(unit.reduces, requires_all_reduce)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own unit and keep its parameters full, also outside forward, until ``reshard()``.

        Collective over the unit's shard group. A module that is no unit has nothing of its own to gather.
        """
        for unit in units_of(self, recurse=False):
            unit.scope.hold(unit.buckets)
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Free what ``unshard()`` gathered."""
        for unit in units_of(self, recurse=False):
            unit.scope.release(unit.buckets)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        """``Module._apply``, behind ``to``, ``half``, ``to_empty``; the flat shards follow their parameters."""
        super()._apply(fn, recurse)  # type: ignore[misc]
        for bucket in {r.bucket for r in self.__dict__.get("_fxshard_reads", {}).values()}:
            bucket.follow_storage()
        return self


def units_of(module: Any, recurse: bool = True) -> list[Unit]:
    """The units of a module and, with ``recurse``, of the modules inside it, outermost first, each once."""
    modules = module.modules() if recurse else [module]
    return list(dict.fromkeys(u for m in modules if (u := getattr(m, "_fxshard_unit", None)) is not None))


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} should be a bool, got {type(value).__name__}")
