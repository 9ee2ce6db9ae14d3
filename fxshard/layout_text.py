"""A layout drawn as text: one line per segment, with what lies in it from left to right.

    2 tensors in 2 segments of 12 elements: 22 used + 2 wasted = 24, waste 9.1%
    shard 0  [ 0, 12)  P0 rows 0-2 [0, 12)
    shard 1  [12, 24)  P0 row 3 [12, 16), P1 row 0 [16, 22), padding of 2

A *hole* is a gap before the end of the last tensor, *padding* the rest of the buffer. Positions are in elements.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from fxshard.layout import GlobalLayout, Range, intersect_ranges, non_leading_numel


def draw_layout(
    layout: GlobalLayout, *, names: Sequence[str] | None = None, max_segments: int = 16, max_pieces: int = 6
) -> str:
    """Draw a layout with at most ``max_segments`` segments and ``max_pieces`` pieces in each; the middle is left out.

    ``names`` has one name per tensor (default P0, P1, ...). ``ValueError`` if it has another length, or if a maximum
    is below 2, which leaves no room for a first and a last.
    """
    count = len(layout.tensor_shapes)
    if names is not None and len(names) != count:
        raise ValueError(f"the layout has {count} tensors, but there are {len(names)} names")
    if min(max_segments, max_pieces) < 2:
        raise ValueError(f"max_segments ({max_segments}) and max_pieces ({max_pieces}) must be at least 2")
    names = names or [f"P{i}" for i in range(count)]
    ranges = [layout.get_tensor_range(i) for i in range(count)]
    order = sorted((i for i in range(count) if ranges[i].numel), key=lambda i: ranges[i].start)
    shards = [str(k) for k in range(layout.dp_size)]
    width, digits = len(shards[-1]), len(str(layout.size))
    lines = []
    for k in _ends(range(layout.dp_size), max_segments):
        if k is None:
            lines.append(f"... {layout.dp_size - max_segments} more shards ...")
            continue
        segment = layout.get_segment_range(k)
        bounds = f"[{segment.start:{digits}}, {segment.end:{digits}})"
        pieces = _pieces(layout, segment, order, ranges, names)
        elision = f"... {len(pieces) - max_pieces} more ..."
        shown = [elision if j is None else pieces[j] for j in _ends(range(len(pieces)), max_pieces)]
        lines.append(f"shard {shards[k]:>{width}}  {bounds}  {', '.join(shown) or 'empty'}")
    return "\n".join([_headline(layout), *lines])


def _headline(layout: GlobalLayout) -> str:
    lengths = [layout.rank_size(k) for k in range(layout.dp_size)]
    length = f"{min(lengths):,}" if layout.has_equal_shard_sizes else f"{min(lengths):,} to {max(lengths):,}"
    return (
        f"{_count(len(layout.tensor_shapes), 'tensor')} in {_count(layout.dp_size, 'segment')} of {length} elements: "
        f"{layout.used:,} used + {layout.size - layout.used:,} wasted = {layout.size:,}, waste {layout.waste:.1%}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _ends(items: range, most: int) -> list[int | None]:
    """All items, or the first and the last ``most`` of them with None for those between."""
    if len(items) <= most:
        return list(items)
    return [*items[: most - most // 2], None, *items[len(items) - most // 2 :]]


def _pieces(
    layout: GlobalLayout, segment: Range, order: Sequence[int], ranges: Sequence[Range], names: Sequence[str]
) -> list[str]:
    """What lies in the segment; ``order`` has the non-empty tensors by position."""
    occupied = ranges[order[-1]].end if order else 0
    pieces, cursor = [], segment.start
    first = max(0, bisect_right(order, segment.start, key=lambda i: ranges[i].start) - 1)
    for i in order[first:]:
        if ranges[i].start >= segment.end:
            break
        owned = intersect_ranges(ranges[i], segment)
        if owned.numel:
            pieces += _gap(cursor, owned.start, occupied)
            pieces.append(f"{names[i]} {_rows(layout, i, owned)} [{owned.start}, {owned.end})")
            cursor = owned.end
    return pieces + _gap(cursor, segment.end, occupied)


def _gap(start: int, end: int, occupied: int) -> list[str]:
    if start == end:
        return []
    return [f"hole of {end - start}" if start < occupied else f"padding of {end - start}"]


def _rows(layout: GlobalLayout, i: int, owned: Range) -> str:
    """The owned rows, or the owned elements where a row is cut or there are none (0-D)."""
    before, shape = owned.start - layout.tensor_to_offset[i], layout.tensor_shapes[i]
    unit, length = ("row", non_leading_numel(shape)) if shape else ("element", 1)
    if before % length or owned.numel % length:
        unit, length = "element", 1
    first, last = before // length, (before + owned.numel) // length - 1
    return f"{unit} {first}" if first == last else f"{unit}s {first}-{last}"
