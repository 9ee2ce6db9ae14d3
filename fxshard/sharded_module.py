"""What fxshard's modules can do beyond ``nn.Module``: what ``torch.distributed.fsdp.FSDPModule`` can, and more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fxshard.reduction import OPS
from fxshard.refused_methods import refuse_the_rest
from fxshard.unit import ParamRead, Unit, units_of


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns; the parameters are gathered already."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


@refuse_the_rest
class ShardedModule:
    """Mixed into the class of every module that fxshard changed: units' own modules and owners of parameters.

    Methods that FSDPModule has too mean the same here; those that have no meaning here are refused by name. Each says
    whether it holds for the modules inside as well.
    """

    _fxshard_unit: Unit | None = None
    _fxshard_reads: dict[str, ParamRead]

    # -- when parameters are full -------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own unit and keep its parameters full, also outside forward, until ``reshard()``.

        Collective over the unit's shard group. A module that is no unit has nothing of its own to gather.
        """
        _check_flag("async_op", async_op)
        for unit in units_of(self, recurse=False):
            unit.scope.hold(unit.buckets)
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Free what ``unshard()`` gathered."""
        for unit in units_of(self, recurse=False):
            unit.scope.release(unit.buckets)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed after forward and gathered again, from all ranks that shard them, for
        backward; from the next call on."""
        _check_flag("reshard_after_forward", reshard_after_forward)
        for unit in units_of(self, recurse):
            unit.set_reshard(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """True, which always holds. ``NotImplementedError`` for False: every forward gathers what it reads."""
        _check_flag("reshard_after_backward", reshard_after_backward)
        if not reshard_after_backward:
            raise NotImplementedError(
                "set_reshard_after_backward(False) is not supported: full parameters are freed after backward and "
                "gathered again by the next forward; leave it at True, or unshard() the module for the micro-batches"
            )

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Units whose all-gathers eager code launches when it gathers this unit in forward; none by default. Compiled
        graphs follow their schedule (option ``prefetch``)."""
        for unit in units_of(self, recurse=False):
            unit.forward_prefetch = _units_named(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """The same in backward."""
        for unit in units_of(self, recurse=False):
            unit.backward_prefetch = _units_named(modules)

    # -- how far gradients are reduced --------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over ranks. While it does not, they accumulate in full on each rank, in
        the reduce dtype and not in ``.grad``, and the first backward that does reduces the sum. Set it before forward
        and backward of a micro-batch."""
        _check_flag("requires_gradient_sync", requires_gradient_sync)
        for unit in units_of(self, recurse):
            unit.set_stage(requires_gradient_sync, requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward ends in ``.grad`` (and, on a (replicate, shard) mesh, reduces over the replicas). While it
        does not, segments reduced over the shard dim accumulate on each rank, and the first backward that does adds
        them to its own. Set it before forward and backward of a micro-batch."""
        _check_flag("requires_all_reduce", requires_all_reduce)
        for unit in units_of(self, recurse):
            unit.set_stage(unit.reduces, requires_all_reduce)

    def waiting_gradients(self) -> list[str]:
        """Names of parameters of which gradients wait for their reduction, by either of the two methods above."""
        units = units_of(self)
        return sorted(b.slots[i].name for u in units for b in u.buckets for i in b.unreduced.ids)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for FSDPModule's sake and without effect: no state outlives a backward that synchronises."""
        _check_flag("is_last_backward", is_last_backward)

    def reset_iter_state(self, recursive: bool = True) -> None:
        """After an exception in forward or backward: drop gathered parameters and gradients that wait.

        Not collective; ``.grad`` and the shards stay. Call it on the module whose forward was called, on every rank.
        """
        _check_flag("recursive", recursive)
        for unit in units_of(self, recursive):
            unit.scope.reset()
            for bucket in unit.buckets:
                bucket.unreduced.clear()

    # -- what divides and multiplies them -----------------------------------------------------------------------------

    def set_reduce_op_type(self, reduce_op_type: str, recurse: bool = True) -> None:
        """"avg" (default): the mean over ranks, as a sum that is divided afterwards; "sum"; or "native avg": the mean
        as the backend's own reduction, where it has one (NCCL). Case and outer spaces do not matter."""
        op = reduce_op_type.strip().lower() if isinstance(reduce_op_type, str) else reduce_op_type
        if op not in OPS:
            raise ValueError(f"reduce_op_type is one of {', '.join(map(repr, OPS))}; got {reduce_op_type!r}")
        for unit in units_of(self, recurse):
            if op == "native avg":
                _check_native_average(unit)
            unit.set_reduction(op, unit.divide_factor)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` in place of the number of ranks; not recursive."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"factor divides gradients and is a number above 0, got {factor!r}")
        for unit in units_of(self, recurse=False):
            unit.set_reduction(unit.reduce_op, float(factor))

    def set_gradient_scaling_factor(self, factor: float | Tensor | None) -> None:
        """Multiply this unit's gradients by ``factor`` (a number or a tensor of one element) before they are reduced;
        None, the default, by nothing. Not recursive. A new value recompiles nothing; a tensor's value is read now."""
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not (factor is None or number or (isinstance(factor, Tensor) and factor.numel() == 1)):
            said = f"a tensor of shape {tuple(factor.shape)}" if isinstance(factor, Tensor) else repr(factor)
            raise ValueError(f"a gradient scaling factor is None, a number or a tensor of one element; got {said}")
        for unit in units_of(self, recurse=False):
            unit.set_scale(factor)

    # -- nn.Module ----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        """``Module._apply``, behind ``to``, ``half``, ``to_empty``; the flat shards follow their parameters."""
        super()._apply(fn, recurse)  # type: ignore[misc]
        for bucket in {r.bucket for r in self.__dict__.get("_fxshard_reads", {}).values()}:
            bucket.follow_storage()
        return self


def _units_named(modules: Any) -> tuple[Unit, ...]:
    if not isinstance(modules, list):
        raise ValueError(f"modules to prefetch are a list of sharded modules, got {type(modules).__name__}")
    for i, module in enumerate(modules):
        if not isinstance(module, ShardedModule) or not units_of(module, recurse=False):
            what = f"item {i} of the modules to prefetch, a {type(module).__name__}"
            raise ValueError(f"{what}, is no unit; apply fully_shard to it first")
    return tuple(u for module in modules for u in units_of(module, recurse=False))


def _check_native_average(unit: Unit) -> None:
    for bucket in unit.buckets:
        backend = bucket.groups.backend
        if backend is not None and "gloo" in backend:
            raise ValueError(
                f'reduce_op_type "native avg" needs a backend that averages, and unit {unit.name!r} communicates over '
                f'{backend}; use "avg", which sums and divides'
            )


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} should be a bool, got {type(value).__name__}")
