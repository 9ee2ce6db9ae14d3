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

Layouts = list[tuple[list[int], GlobalLayout]]


def plan_layouts(shapes: Sequence[torch.Size], dp_size: int, itemsize: int, block_sizes: Sequence[int]) -> Layouts:
    """Layouts with equal segments for tensors in storage form, each with the ids of its tensors, ascending.

    One layout, unless its padding exceeds both ``WASTE_BOUND`` and ``SPLIT_PADDING``; then one per group of row sizes
    that go well together. ``itemsize`` is bytes an element of the gathered buffer, ``block_sizes`` rows that stay
    together, one per tensor. Depends on the arguments alone. ``ValueError`` as ``plan_compact``.
    """
    align = max(1, ALIGNMENT // itemsize)
    whole = plan_compact(shapes, dp_size, block_sizes=block_sizes, align=align)
    if whole.waste <= WASTE_BOUND or (whole.size - whole.used) * itemsize <= SPLIT_PADDING:
        return [(list(range(len(shapes))), whole)]
    groups = split_by_row_family(shapes, dp_size, block_sizes=block_sizes, align=align, waste_bound=WASTE_BOUND)
    blocks = [[block_sizes[i] for i in ids] for ids in groups]
    return [
        (ids, plan_compact([shapes[i] for i in ids], dp_size, block_sizes=b, align=align))
        for ids, b in zip(groups, blocks, strict=True)
    ]


def plan_whole_tensors(shapes: Sequence[torch.Size], dp_size: int, owners: Sequence[int]) -> GlobalLayout:
    """A layout in which each tensor lies whole in its owner's segment, every segment padded to the longest.

    Equal segments let one ``all_gather_into_tensor`` and one ``reduce_scatter_tensor`` serve the bucket, and since no
    tensor crosses segments every full parameter stays a view. It costs ``dp_size`` times the longest segment on the
    wire and in the gathered buffer, instead of the sum of the segments: balanced owners keep that small.
    """
    tight = GlobalLayout.build_for_tensor_atomic(shapes, dp_size, tensor_owners=owners)
    longest = max(tight.rank_size(k) for k in range(dp_size))
    offsets = [
        k * longest + offset - tight.rank_to_offset[k] for offset, k in zip(tight.tensor_to_offset, owners, strict=True)
    ]
    return GlobalLayout(shapes, offsets, dp_size * longest, [k * longest for k in range(dp_size)])
