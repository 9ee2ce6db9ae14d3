"""How summed gradients become what users get: how far a reduction goes, what divides it, and where.

Pure data. The mean over W shard ranks and R replicas is a sum on the wire and a division in the reduce dtype behind
each stage: by W after the reduce-scatter, by R after the all-reduce. fp16 would overflow in the sum, so there a power
of two near the square root of all ranks divides before it, and the rest after, as ``torch.distributed.fsdp`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

Stage = Literal["all", "main", "shard", "none"]
"""How far gradients are reduced: over all ranks, for ``.grad`` (storage dtype) or ``main_grad`` (reduce dtype); over
the shard dim alone, while the all-reduce waits; not at all."""


def as_stage(text: str) -> Stage:
    """A stage from the string that a graph node holds."""
    if text not in get_args(Stage):
        raise ValueError(f"a stage is one of {', '.join(get_args(Stage))}; got {text!r}")
    return text  # type: ignore[return-value]


OPS = ("avg", "sum", "native avg")
"""What users may ask for: the mean as sum and division, the sum, the mean as the backend's own reduction."""


@dataclass(frozen=True)
class Reduction:
    """``op`` on the wire ("sum" or "avg"), and the divisors: of the packed gradients before they are sent, of what the
    reduce-scatter gives, of what the all-reduce gives. 1.0 divides by nothing."""

    op: str = "sum"
    before: float = 1.0
    after_shard: float = 1.0
    after_replicate: float = 1.0


def plan_reduction(
    shard_size: int, replicate_size: int, dtype: torch.dtype, op: str = "avg", divide_factor: float | None = None
) -> Reduction:
    """The reduction of a bucket over ``shard_size`` times ``replicate_size`` ranks in ``dtype``.

    ``divide_factor`` takes the place of the number of ranks (for "sum": of 1), and divides behind the last stage.
    """
    ranks = shard_size * replicate_size
    if op == "native avg" and divide_factor is None:
        return Reduction("avg")
    if divide_factor is None and op == "sum":
        return Reduction()
    total = float(ranks if divide_factor is None else divide_factor)
    before = _half_of(ranks, total) if dtype is torch.float16 else 1.0
    if divide_factor is None and before == 1.0:
        return Reduction("sum", 1.0, float(shard_size), float(replicate_size))
    return Reduction("sum", before, *((1.0, total / before) if replicate_size > 1 else (total / before, 1.0)))


def _half_of(ranks: int, total: float) -> float:
    """The largest power of two that divides ``ranks`` and is at most the square root of ``total``."""
    half = 1
    while ranks % (half * 2) == 0 and total / (half * 2) >= half * 2:
        half *= 2
    return float(half)
