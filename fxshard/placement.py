"""What one shard of a flat buffer may hold: slices cut between rows, between blocks of rows, or whole tensors.

The placements are dim-0 subclasses of torch's ``Shard``, so generic code sees them as sharded; unlike ``Shard``, whose
equality looks at ``dim`` alone, they are equal only to a placement of their own kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapreplace
from operator import index as as_int
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from fxshard.layout import check_dp_size


class _FlatPlacement(Shard):
    """A shard of a whole bucket's buffer. Compared, hashed, printed and copied by kind and arguments."""

    def __init__(self) -> None:
        super().__init__(0)

    def _arguments(self) -> tuple[int | None, ...]:
        return ()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._arguments() == other._arguments()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self).__qualname__, self._arguments()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self._arguments()))})"

    __str__ = __repr__

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        # The base class would print every subclass as Shard(dim=0) into generated FX code.
        return repr(self), {type(self).__name__: type(self)}

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[int | None, ...]]:
        # The base class is native and would be rebuilt as a plain Shard.
        return type(self), self._arguments()


class RowAtomic(_FlatPlacement):
    """An equal slice of the bucket's buffer, cut between rows: a tensor may spread unevenly over a run of ranks."""


class BlockAtomic(_FlatPlacement):
    """Like ``RowAtomic``, but blocks of ``block_size`` rows stay whole, so that block-scaled formats quantise locally.

    ``ValueError`` if ``block_size`` is not positive. Every dim 0 must be a multiple of it.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = as_int(block_size)
        if self.block_size <= 0:
            raise ValueError(f"BlockAtomic needs a positive number of rows, not {block_size}")

    def _arguments(self) -> tuple[int, ...]:
        return (self.block_size,)


class TensorAtomic(_FlatPlacement):
    """Whole tensors: one shard owns a tensor, the others hold none of its rows.

    ``owner`` is the owning segment, a rank of the shard dim; None leaves it to ``plan_owners``. ``ValueError`` if it is
    no plain int or negative.
    """

    def __init__(self, owner: int | None = None) -> None:
        super().__init__()
        if owner is not None and (type(owner) is not int or owner < 0):
            raise ValueError(f"the owner of a TensorAtomic is a segment number from 0, not {owner!r}")
        self.owner = owner

    def _arguments(self) -> tuple[int | None, ...]:
        return () if self.owner is None else (self.owner,)


def plan_owners(numels: Sequence[int], dp_size: int) -> tuple[int, ...]:
    """Owning segment of each tensor, for ``TensorAtomic``: the largest first, each to the least loaded segment so far.

    ``numels`` are elements (or any other non-negative load) by tensor id. Equal loads go to the lower segment, equal
    tensors in id order, so every rank finds the same owners. The heaviest segment carries at most
    ``4/3 - 1/(3 * dp_size)`` times the least possible (Graham, *Bounds on Multiprocessing Timing Anomalies*, 1969).
    ``ValueError`` if ``dp_size`` is not positive or a load is negative.
    """
    check_dp_size(dp_size)
    for i, numel in enumerate(numels):
        if numel < 0:
            raise ValueError(f"tensor {i} cannot have a negative number of elements: {numel}")
    owners = [0] * len(numels)
    loads = [(0, k) for k in range(dp_size)]
    for i in sorted(range(len(numels)), key=lambda i: -numels[i]):
        load, owners[i] = loads[0]
        heapreplace(loads, (load + numels[i], owners[i]))
    return tuple(owners)


def check_flat_placements(placements: Sequence[Any]) -> None:
    """Whether a flat buffer can be placed like this over the mesh axes, outermost first.

    ``TypeError`` for anything but ``Shard`` (or a subclass), ``Replicate`` and ``Partial``; ``_StridedShard`` is not a
    subclass of ``Shard``. ``NotImplementedError`` for ``Shard(k)`` with k != 0 and for ``TensorAtomic`` on two axes.
    ``ValueError`` if ``TensorAtomic`` is mixed with another sharded placement, or if a sharded axis stands before one
    that is not: only a suffix of sharded axes leaves each rank one contiguous range.
    """
    for placement in placements:
        if not isinstance(placement, Shard | Replicate | Partial):
            raise TypeError(f"{placement!r} cannot place a flat buffer: use Shard, Replicate or Partial")
        if isinstance(placement, Shard) and placement.dim != 0:
            raise NotImplementedError(
                f"{placement!r} cuts along dim {placement.dim}, but a flat buffer is cut along dim 0: move that dim to "
                "the front of the stored parameter"
            )
    sharded = [placement for placement in placements if isinstance(placement, Shard)]
    whole = [placement for placement in sharded if isinstance(placement, TensorAtomic)]
    if whole and len(whole) != len(sharded):
        raise ValueError(f"TensorAtomic cannot be mixed with another sharded placement: {list(placements)}")
    if len(whole) > 1:
        raise NotImplementedError(f"TensorAtomic shards one mesh axis only, but the placements are {list(placements)}")
    if any(isinstance(placement, Shard) for placement in placements[: len(placements) - len(sharded)]):
        raise ValueError(
            f"sharded axes must come last, but the placements are {list(placements)}: put the axes to shard innermost"
        )
