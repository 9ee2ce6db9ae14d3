"""Which layouts the parameters of one bucket get: the tightest one, or several where one cannot be tight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxshard.layout import GlobalLayout
from fxshard.layout_planner import plan_compact, split_by_row_family

ALIGNMENT = 128
"""Bytes to which tensors start aligned where a layout has room: misaligned matrices make matmuls slow."""

WASTE_BOUND = 0.02
"""Share of a bucket that may be padding."""

SPLIT_PADDING = 4 << 20
"""Bytes of padding below which a bucket stays whole: sending them costs less than the latency of one more collective
(tens of microseconds at about 100 GB/s)."""


def plan_layouts(shapes: Sequence[torch.Size], dp_size: int, itemsize: int) -> list[tuple[list[int], GlobalLayout]]:
    """Layouts with equal segments for tensors in storage form, each with the ids of its tensors, ascending.

    One layout, unless its padding exceeds both ``WASTE_BOUND`` and ``SPLIT_PADDING``; then one per group of row sizes
    that go well together. ``itemsize`` is bytes an element of the gathered buffer. Depends on the arguments alone.
    """
    align = max(1, ALIGNMENT // itemsize)
    whole = plan_compact(shapes, dp_size, align=align)
    if whole.waste <= WASTE_BOUND or (whole.size - whole.used) * itemsize <= SPLIT_PADDING:
        return [(list(range(len(shapes))), whole)]
    groups = split_by_row_family(shapes, dp_size, align=align, waste_bound=WASTE_BOUND)
    return [(ids, plan_compact([shapes[i] for i in ids], dp_size, align=align)) for ids in groups]
