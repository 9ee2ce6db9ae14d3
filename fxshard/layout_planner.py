"""Tighter row-atomic layouts than the documented builder's: equal segments, but not multiples of every row size.

    GlobalLayout.build_for_row_atomic              plan_compact
    segment = multiple of the lcm of all rows      segment = multiple of the rows of those tensors only that reach over
    every tensor starts on its own row             two boundaries; the others are shifted until a boundary meets a row

A boundary may fall inside a tensor wherever one of its rows (blocks of rows) ends. A tensor that reaches over two
boundaries has a row end at both, so its row size divides the segment; with one boundary inside, a shift is enough; with
none, the tensor may lie anywhere. Everything is counted in elements and depends on shapes and shard count alone, so
all ranks plan the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import combinations
from typing import NamedTuple

import torch

from fxshard.layout import GlobalLayout, Shape, _pad_to_multiple, block_numels, check_dp_size, pack_in_chunks

ALIGNMENT_COST = 0.01
"""Share of the used elements that ``plan_compact`` adds at most so that every tensor starts aligned."""


def plan_compact(
    shapes: Iterable[Shape], dp_size: int, *, block_sizes: int | Sequence[int] = 1, align: int = 1
) -> GlobalLayout:
    """Equal segments cut between rows (blocks of rows), as short as the planner finds; passes ``validate_compact``.

    Args:
        shapes: full shape of each tensor, by tensor id; tensors are placed in any order.
        dp_size: number of segments.
        block_sizes: rows that stay together, one number for all tensors or one per tensor.
        align: in elements; non-empty tensors start at multiples of it. All of them do where that costs at most
            ``ALIGNMENT_COST`` of the used elements; otherwise those that can without making the buffer longer.

    The buffer is never longer than the documented builder's, whose layout is the fallback. Without ``align`` it is
    never longer than ``compact_size_bound``. Raises ``ValueError`` for what ``build_for_row_atomic`` refuses, and for
    an ``align`` that is not positive.
    """
    check_dp_size(dp_size)
    sizes = [torch.Size(shape) for shape in shapes]
    blocks = block_numels(sizes, block_sizes)
    if align <= 0:
        raise ValueError(f"align is a number of elements and must be positive, not {align}")
    numels = [shape.numel() for shape in sizes]
    items = _items(numels, blocks)
    chunk = math.lcm(*blocks)
    padded, end = pack_in_chunks(numels, blocks, chunk)
    segment = _pad_to_multiple(end, chunk * dp_size) // dp_size
    placed = dict(enumerate(padded))
    if items:
        low, high = _least_segment(items, dp_size), min(segment, _segment_bound(items, dp_size))
        segment, placed = _search(items, dp_size, low, high, 1) or (segment, placed)
        if align > 1:
            allowance = int(ALIGNMENT_COST * sum(numels)) // dp_size
            aligned = _search(items, dp_size, segment, segment + allowance, align)
            if aligned is not None and aligned[0] * dp_size <= _pad_to_multiple(end, chunk * dp_size):
                segment, placed = aligned
            else:
                placed = _Packing(items, dp_size, segment, align, strict=False).run() or placed
    layout = GlobalLayout(
        sizes,
        (placed.get(i, 0) for i in range(len(sizes))),  # a tensor without elements takes no place
        segment * dp_size,
        (k * segment for k in range(dp_size)),
    )
    validate_compact(layout, block_sizes)
    return layout


def validate_compact(layout: GlobalLayout, block_sizes: int | Sequence[int] = 1) -> None:
    """``ValueError`` unless segments are equal and each boundary inside a tensor falls between its rows (blocks)."""
    blocks = block_numels(layout.tensor_shapes, block_sizes)
    if not layout.has_equal_shard_sizes:
        lengths = [layout.rank_size(k) for k in range(layout.dp_size)]
        raise ValueError(f"a compact layout needs segments of equal length, but they are {lengths}")
    segment = layout.rank_size(0)
    for i, block in enumerate(blocks):
        tensor = layout.get_tensor_range(i)
        if tensor.numel == 0:
            continue
        for boundary in range((tensor.start // segment + 1) * segment, tensor.end, segment):
            if (boundary - tensor.start) % block:
                raise ValueError(
                    f"segment {boundary // segment} starts at {boundary}, which cuts tensor {i} at "
                    f"[{tensor.start}, {tensor.end}) after {boundary - tensor.start} elements, not after a multiple of "
                    f"its block of {block}"
                )


def compact_size_bound(shapes: Iterable[Shape], dp_size: int, *, block_sizes: int | Sequence[int] = 1) -> int:
    """Elements that a plan of ``plan_compact`` without ``align`` never exceeds.

    Call a tensor *long* if it has more elements than ``used / dp_size``, and C the lcm of the blocks of the long
    tensors. In segments that are a multiple of C, long tensors follow each other in families of equal blocks with a gap
    shorter than a block between families; a short tensor that meets a boundary is shifted by less than its block, and
    ``dp_size - 1`` of them can. With G the sum of the blocks of the families and of the ``dp_size - 1`` largest blocks,
    everything fits in ``used + G`` elements, rounded up to ``C * dp_size``.
    """
    check_dp_size(dp_size)
    sizes = [torch.Size(shape) for shape in shapes]
    items = _items([shape.numel() for shape in sizes], block_numels(sizes, block_sizes))
    return _segment_bound(items, dp_size) * dp_size


def split_by_row_family(
    shapes: Iterable[Shape],
    dp_size: int,
    *,
    block_sizes: int | Sequence[int] = 1,
    align: int = 1,
    waste_bound: float = 0.02,
) -> list[list[int]]:
    """Tensor ids of the fewest buckets that together waste at most ``waste_bound`` of the used elements.

    Tensors with equal rows (blocks) stay together, since a segment that suits one of them suits all. Starting from one
    bucket per row size, the two whose union costs least are merged again and again. Where no split meets the bound, it
    is the fewest buckets within ``waste_bound`` of the least waste found. Ids ascend inside a bucket, buckets by their
    first id. The other arguments, and the errors, are those of ``plan_compact``; a negative bound is a ``ValueError``.
    """
    check_dp_size(dp_size)
    _check_waste_bound(waste_bound)
    sizes = [torch.Size(shape) for shape in shapes]
    blocks = block_numels(sizes, block_sizes)
    rows = [block_sizes] * len(sizes) if isinstance(block_sizes, int) else list(block_sizes)
    items = {item.id: item for item in _items([shape.numel() for shape in sizes], blocks)}

    def estimate(bucket: list[int]) -> int:
        return _least_segment([items[i] for i in bucket if i in items], dp_size)

    def planned(buckets: list[list[int]]) -> int:
        plans = (
            plan_compact([sizes[i] for i in ids], dp_size, block_sizes=[rows[i] for i in ids], align=align)
            for ids in buckets
        )
        return sum(plan.size for plan in plans)

    used = sum(item.numel for item in items.values())
    everything = [list(range(len(sizes)))]
    if planned(everything) <= (1 + waste_bound) * used:
        return everything
    families: dict[int, list[int]] = {}
    for i, block in enumerate(blocks):
        families.setdefault(block, []).append(i)
    buckets = list(families.values())
    splits = [buckets]
    while len(buckets) > 1:
        a, b = min(
            combinations(range(len(buckets)), 2),
            key=lambda pair: estimate(buckets[pair[0]] + buckets[pair[1]]) - sum(estimate(buckets[k]) for k in pair),
        )
        merged = sorted(buckets[a] + buckets[b])
        buckets = sorted([merged, *(bucket for k, bucket in enumerate(buckets) if k not in (a, b))])
        splits.append(buckets)
    costs = [planned(split) for split in splits]
    bound = (1 + waste_bound) * used
    limit = bound if min(costs) <= bound else min(costs) + waste_bound * used
    return min((split for split, cost in zip(splits, costs, strict=True) if cost <= limit), key=len)


def waste_reason(
    shapes: Iterable[Shape],
    dp_size: int,
    *,
    block_sizes: int | Sequence[int] = 1,
    waste_bound: float = 0.02,
    names: Sequence[str] | None = None,
) -> str | None:
    """Why one bucket of these tensors wastes more than ``waste_bound``, as a sentence; None if it does not.

    ``names``, one per tensor, replace "tensor 3" in the sentence. The errors are those of ``plan_compact``; a negative
    bound or another number of names is a ``ValueError``.
    """
    _check_waste_bound(waste_bound)
    layout = plan_compact(shapes, dp_size, block_sizes=block_sizes)
    sizes = layout.tensor_shapes
    if names is not None and len(names) != len(sizes):
        raise ValueError(f"{len(sizes)} tensors need as many names, but there are {len(names)}")
    if layout.waste <= waste_bound:
        return None
    items = _items([shape.numel() for shape in sizes], block_numels(sizes, block_sizes))
    fair, segment = -(-layout.used // dp_size), layout.rank_size(0)
    excess = f"{segment:,} ({layout.waste:.1%} waste)"
    opening = f"at {dp_size} shards a fair share is {fair:,} elements but a segment has {excess}"
    cut_often = [item for item in items if _cut_once_from(item) > fair]
    if _least_segment(items, dp_size) < segment or not cut_often:
        return f"{opening}: the gaps before rows that meet a boundary add up; use fewer shards or larger buckets"
    families: dict[int, list[str]] = {}
    for item in sorted(cut_often, key=lambda item: -item.block):
        families.setdefault(item.block, []).append(names[item.id] if names else f"tensor {item.id}")
    rows = _enumerate([f"{block:,} elements ({_enumerate(ids)})" for block, ids in families.items()])
    longest = _enumerate(next(iter(families.values())))
    remedy = "split the bucket by row size" if len(families) > 1 else "use fewer shards"
    return (
        f"{opening}: tensors that reach over several shards are cut between rows (blocks) of {rows}, so it is a "
        f"multiple of {math.lcm(*families):,} or half as long as such a tensor; {remedy}, or shard {longest} along "
        "another dim"
    )


def _check_waste_bound(waste_bound: float) -> None:
    if waste_bound < 0:
        raise ValueError(f"waste_bound is a share of the used elements and cannot be negative: {waste_bound}")


def _enumerate(members: Sequence[str]) -> str:
    return ", ".join(members[:3]) + (f" and {len(members) - 3} more" if len(members) > 3 else "")


class _Item(NamedTuple):
    """One non-empty tensor, as the planner sees it: ``numel`` elements in blocks of ``block`` that stay whole."""

    id: int
    numel: int
    block: int


def _items(numels: Sequence[int], blocks: Sequence[int]) -> list[_Item]:
    return [_Item(i, numel, block) for i, (numel, block) in enumerate(zip(numels, blocks, strict=True)) if numel]


def _cut_once_from(item: _Item) -> int:
    """The shortest segment that leaves the tensor with at most one boundary inside."""
    return item.block * -(-item.numel // item.block // 2)


def _segment_bound(items: Sequence[_Item], dp_size: int) -> int:
    used = sum(item.numel for item in items)
    families = {item.block for item in items if item.numel * dp_size > used}
    gaps = sum(block - 1 for block in families) + sum(nlargest(dp_size - 1, (item.block - 1 for item in items)))
    return _pad_to_multiple(used + gaps, math.lcm(*families) * dp_size) // dp_size


def _least_segment(items: Sequence[_Item], dp_size: int, at_least: int = 0, multiple_of: int = 1) -> int:
    """The shortest segment that holds a fair share and suits each tensor by itself, whether or not they all pack."""
    segment = max(at_least, -(-sum(item.numel for item in items) // dp_size))
    if dp_size == 1:
        return _pad_to_multiple(segment, multiple_of)
    longest: dict[int, _Item] = {}
    for item in items:
        if item.block not in longest or item.numel > longest[item.block].numel:
            longest[item.block] = item
    cut_once_from = {block: _cut_once_from(item) for block, item in longest.items()}
    while True:
        divisors = [block for block, length in cut_once_from.items() if length > segment]
        candidate = _pad_to_multiple(segment, math.lcm(multiple_of, *divisors))
        next_change = min((cut_once_from[block] for block in divisors), default=candidate + 1)
        if candidate < next_change:
            return candidate
        segment = next_change


class _Packing:
    """Places items into ``dp_size`` segments of ``segment`` elements: the long ones in a row, the short ones in gaps.

    With ``strict`` every item starts on a multiple of ``align``; without, those do that can with the room to spare.
    """

    def __init__(self, items: Sequence[_Item], dp_size: int, segment: int, align: int, *, strict: bool) -> None:
        self.segment, self.size, self.align, self.strict = segment, dp_size * segment, align, strict
        self.spare = self.size - sum(item.numel for item in items)
        # Long items that fit only when shifted come first. The others follow in families of equal blocks: no gaps
        # inside a family, and between two one that is shorter than the smaller block.
        self.long = sorted(
            (item for item in items if item.numel > segment),
            key=lambda item: (segment % item.block == 0, -item.block, -item.numel),
        )
        self.short = sorted((item for item in items if item.numel <= segment), key=lambda item: -item.numel)
        self.smallest = min((item.numel for item in self.short), default=self.size)

    def run(self) -> dict[int, int] | None:
        """Offset by tensor id, or None if an item finds no place."""
        if self.spare < 0:
            return None
        offsets: dict[int, int] = {}
        gaps: list[tuple[int, int]] = []
        tail = 0
        for item in self.long + self.short:
            for index, (start, end) in enumerate(gaps):
                if end - start >= item.numel and (offset := self._fit(item, start, end)) is not None:
                    gaps[index : index + 1] = self._usable((start, offset), (offset + item.numel, end))
                    break
            else:
                offset = self._fit(item, tail, self.size)
                if offset is None:
                    return None
                gaps += self._usable((tail, offset))
                tail = offset + item.numel
            offsets[item.id] = offset
        return offsets

    def _usable(self, *gaps: tuple[int, int]) -> list[tuple[int, int]]:
        """The gaps that can still hold an item, without the elements that it cannot start on."""
        starts = (_pad_to_multiple(start, self.align if self.strict else 1) for start, _ in gaps)
        return [(start, end) for start, (_, end) in zip(starts, gaps, strict=True) if end - start >= self.smallest]

    def _fit(self, item: _Item, start: int, end: int) -> int | None:
        """Where the item goes in the gap from ``start`` to ``end``, if it fits."""
        offset = self._first_start(item, start, end, self.align)
        if not self.strict:
            unaligned = self._first_start(item, start, end, 1)
            if offset + item.numel > end or offset - unaligned > self.spare:
                offset = unaligned
            self.spare -= offset - unaligned
        return offset if offset + item.numel <= end else None

    def _first_start(self, item: _Item, start: int, end: int, align: int) -> int:
        """The first legal offset from ``start`` on that is a multiple of ``align``, or one too late for ``end``."""
        while True:
            offset = _pad_to_multiple(start, align)
            boundary = (offset // self.segment + 1) * self.segment
            if offset + item.numel <= boundary or offset + item.numel > end:
                return offset
            before = _blocks_before(boundary, boundary - offset, item.block, align)
            behind = item.numel - before * item.block
            if before and (behind <= self.segment or self.segment % item.block == 0):
                return boundary - before * item.block
            start = boundary


def _blocks_before(boundary: int, room: int, block: int, align: int) -> int:
    """The most blocks that end at ``boundary``, start on a multiple of ``align`` and take at most ``room``."""
    most, common = room // block, math.gcd(block, align)
    if boundary % common:
        return 0
    step = align // common
    residue = boundary // common * pow(block // common, -1, step) % step
    return max(0, most - (most - residue) % step)


def _search(items: Sequence[_Item], dp_size: int, low: int, high: int, align: int) -> tuple[int, dict[int, int]] | None:
    """A short segment in ``[low, high]`` that the items pack into, and their offsets. None if no tried one does."""
    best: tuple[int, dict[int, int]] | None = None
    for grid in _grids(items, align, high):
        limit = best[0] - 1 if best else high
        if limit - low >= _precision(low) or not best:
            best = _search_grid(items, dp_size, low, limit, align, grid) or best
    return best


def _precision(low: int) -> int:
    """Segments that differ by less (1/4096) are not worth another try."""
    return max(1, low >> 12)


def _grids(items: Sequence[_Item], align: int, ceiling: int) -> list[int]:
    """Numbers whose multiples are worth trying as segments, since boundaries then meet the rows of more tensors.

    ``align``, its lcm with the block that holds most elements, with the next too, and with the third.
    """
    held: dict[int, int] = {}
    for item in items:
        held[item.block] = held.get(item.block, 0) + item.numel
    grids = [align]
    for block in sorted(held, key=lambda block: (-held[block], block))[:3]:
        grids.append(math.lcm(grids[-1], block))
    return sorted({grid for grid in grids if grid <= ceiling})


def _search_grid(
    items: Sequence[_Item], dp_size: int, low: int, high: int, align: int, grid: int
) -> tuple[int, dict[int, int]] | None:
    """``_search`` among multiples of ``grid`` and ``high``: the step doubles until the items fit, then halves."""
    precision = _precision(low)
    best: tuple[int, dict[int, int]] | None = None
    failed, step, segment = low - 1, precision, low
    while best is None:
        if failed >= high:
            return None
        segment = min(_least_segment(items, dp_size, segment, grid), high)
        offsets = _Packing(items, dp_size, segment, align, strict=True).run()
        if offsets is None:
            failed, segment, step = segment, segment + step, step * 2
        else:
            best = segment, offsets
    upper = best[0]
    while upper - failed > precision:
        middle = (failed + upper) // 2
        segment = _least_segment(items, dp_size, middle, grid)
        offsets = None if segment >= best[0] else _Packing(items, dp_size, segment, align, strict=True).run()
        if segment >= best[0]:
            upper = middle
        elif offsets is None:
            failed = segment
        else:
            best, upper = (segment, offsets), segment
    return best
