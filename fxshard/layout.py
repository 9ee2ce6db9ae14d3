"""GlobalLayout: where each parameter of a bucket lies in one flat buffer, and which part of it each shard holds.

Words: *tensor id* is the position in the list of shapes, *row* one index of dim 0, *row size* the elements of one row,
*segment* the contiguous piece of the buffer planned for one shard, *gap* elements that belong to no tensor, *chunk*
the least common multiple of the row sizes (or block sizes). Everything is counted in elements, never in bytes.

Nothing here knows a dtype, a device, a rank or a process group. The placement rules follow the published documentation
of GlobalLayout in Megatron-FSDP (megatron-core 0.20); ``fxshard.layout_planner`` has a tighter planner.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import index as as_int
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Shape: TypeAlias = Sequence[int]
"""The full logical shape of a tensor; layouts keep it as ``torch.Size``."""


@dataclass(frozen=True, slots=True)
class Range:
    """``numel`` elements from position ``start`` of a flat buffer on."""

    start: int
    numel: int

    @property
    def end(self) -> int:
        """The position after the last element."""
        return self.start + self.numel


def intersect_ranges(first: Range, second: Range) -> Range:
    """The elements both ranges hold. Disjoint ranges give the later start and numel 0, so test ``numel``."""
    start = max(first.start, second.start)
    return Range(start, max(0, min(first.end, second.end) - start))


def non_leading_numel(shape: Shape) -> int:
    """Row size of a shape in elements: the product of all dims after dim 0. ``ValueError`` for a 0-D shape."""
    if len(shape) == 0:
        raise ValueError("0-D shapes are not supported: a tensor without dims has no rows; reshape it to (1,)")
    return math.prod(shape[1:])


def _pad_to_multiple(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``. ``ValueError`` if ``multiple`` <= 0."""
    if multiple <= 0:
        raise ValueError(f"can only round up to a positive multiple, not to {multiple} (value {value})")
    return -(-value // multiple) * multiple


def block_numels(shapes: Iterable[Shape], block_sizes: int | Sequence[int] = 1) -> tuple[int, ...]:
    """Elements of one block of rows, per tensor; ``block_sizes`` counts rows, one for all tensors or one per tensor.

    Raises ``ValueError``, in this order, for a number of block sizes that differs from the number of tensors, a block
    size that is not positive, then in id order for a 0-D shape, a row of 0 elements, a dim 0 that is not a multiple of
    the block size.
    """
    shapes = list(shapes)
    sizes = [block_sizes] * max(1, len(shapes)) if isinstance(block_sizes, int) else list(block_sizes)
    if not isinstance(block_sizes, int) and len(sizes) != len(shapes):
        raise ValueError(f"{len(shapes)} tensors need one block size or as many, but there are {len(sizes)}")
    for size in sizes:
        if size <= 0:
            raise ValueError(f"block_size counts rows and must be positive, not {size}")
    return tuple(_block_numel(i, shape, size) for i, (shape, size) in enumerate(zip(shapes, sizes, strict=False)))


def _block_numel(i: int, shape: Shape, block_size: int) -> int:
    if len(shape) == 0:
        raise ValueError(f"tensor {i} is 0-D: 0-D shapes are not supported by row-atomic layouts; reshape it to (1,)")
    row = non_leading_numel(shape)
    if row == 0:
        raise ValueError(f"tensor {i} of shape {tuple(shape)} has rows of 0 elements; leave it out of the bucket")
    if shape[0] % block_size:
        raise ValueError(
            f"tensor {i} of shape {tuple(shape)} has {shape[0]} rows, which is not a multiple of block_size "
            f"{block_size}; choose a block size that divides dim 0"
        )
    return block_size * row


def check_dp_size(dp_size: int) -> None:
    """``ValueError`` unless there is at least one segment."""
    if dp_size <= 0:
        raise ValueError(f"dp_size is the number of segments and must be positive, not {dp_size}")


def _require(holds: bool, message: str) -> None:
    # Not an assert statement: python -O must keep the check.
    if not holds:
        raise AssertionError(message)


@dataclass(frozen=True)
class GlobalLayout:
    """Placement of a list of tensors in one flat buffer. Immutable, hashable, compared by value.

    Fields (any iterables are accepted and converted; all in elements):
        tensor_shapes: full shape of each tensor, by tensor id.
        tensor_to_offset: position of each tensor's first element, by tensor id.
        size: length of the whole buffer, gaps and tail padding included.
        rank_to_offset: start of each segment; segment k ends where k + 1 starts, the last one at ``size``.

    Raises ``AssertionError`` if the fields contradict each other: negative size, offsets out of bounds, segment starts
    that decrease, non-empty tensors that overlap. A tensor without elements occupies nothing and overlaps nothing.
    Alignment and the cut of tensors are not checked here but by the ``validate_*`` methods.
    """

    tensor_shapes: tuple[torch.Size, ...]
    tensor_to_offset: tuple[int, ...]
    size: int
    rank_to_offset: tuple[int, ...]

    def __init__(
        self,
        tensor_shapes: Iterable[Shape],
        tensor_to_offset: Iterable[int],
        size: int,
        rank_to_offset: Iterable[int],
    ) -> None:
        fields = {
            "tensor_shapes": tuple(torch.Size(shape) for shape in tensor_shapes),
            "tensor_to_offset": tuple(map(as_int, tensor_to_offset)),
            "size": as_int(size),
            "rank_to_offset": tuple(map(as_int, rank_to_offset)),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        size, starts, offsets = self.size, self.rank_to_offset, self.tensor_to_offset
        _require(size >= 0, f"size must not be negative, but is {size}")
        _require(
            len(offsets) == len(self.tensor_shapes),
            f"{len(self.tensor_shapes)} shapes need as many offsets, but there are {len(offsets)}",
        )
        _require(len(starts) > 0, "a layout needs at least one segment, but rank_to_offset is empty")
        _require(starts[0] == 0, f"the first segment starts at 0, not at {starts[0]}")
        _require(starts[-1] <= size, f"the last segment starts at {starts[-1]}, after the end of the buffer ({size})")
        for k, (start, after) in enumerate(pairwise(starts)):
            _require(start <= after, f"segment {k + 1} starts at {after}, before segment {k} ({start})")
        for i, offset in enumerate(offsets):
            _require(offset >= 0, f"tensor {i} has a negative offset: {offset}")
            end = offset + self._numels[i]
            _require(end <= size, f"tensor {i} ends at {end}, after the end of the buffer ({size})")
        occupied = sorted((offset, n, i) for i, (offset, n) in enumerate(zip(offsets, self._numels, strict=True)) if n)
        for (offset, n, i), (later, _, j) in pairwise(occupied):
            _require(
                offset + n <= later,
                f"tensors {i} and {j} overlap: {i} takes [{offset}, {offset + n}) and {j} starts at {later}",
            )

    @cached_property
    def _numels(self) -> tuple[int, ...]:
        return tuple(map(math.prod, self.tensor_shapes))

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __str__(self) -> str:
        from fxshard.layout_text import draw_layout  # a drawing is made of a layout, so it imports this module

        return draw_layout(self)

    # ---- sizes, in elements ------------------------------------------------------------------------------------

    @property
    def dp_size(self) -> int:
        """Number of segments."""
        return len(self.rank_to_offset)

    def rank_size(self, k: int) -> int:
        """Elements of segment ``k``. ``IndexError`` outside ``[0, dp_size)``."""
        if not 0 <= k < self.dp_size:
            raise IndexError(f"segment {k} does not exist: the layout has segments 0 to {self.dp_size - 1}")
        end = self.rank_to_offset[k + 1] if k + 1 < self.dp_size else self.size
        return end - self.rank_to_offset[k]

    @cached_property
    def has_equal_shard_sizes(self) -> bool:
        """Whether all segments are equally long, as the ``_into_tensor`` collectives need."""
        return len({self.rank_size(k) for k in range(self.dp_size)}) == 1

    @cached_property
    def used(self) -> int:
        """Elements that belong to a tensor."""
        return sum(self._numels)

    @property
    def waste(self) -> float:
        """``size / used - 1``: elements of gaps and padding per element of a tensor. 0.0 for an empty buffer."""
        if self.size == self.used:
            return 0.0
        return self.size / self.used - 1 if self.used else math.inf

    def chunk_size(self, *, block_size: int = 1) -> int:
        """Least common multiple of the tensors' row (block) sizes; see ``block_numels`` for what is refused."""
        return math.lcm(*block_numels(self.tensor_shapes, block_size))

    # ---- ranges ------------------------------------------------------------------------------------------------

    def get_tensor_range(self, i: int) -> Range:
        """Where tensor ``i`` lies in the buffer. ``IndexError`` for an id that does not exist, negative ones too."""
        if not 0 <= i < len(self.tensor_shapes):
            raise IndexError(f"tensor {i} does not exist: the layout has {len(self.tensor_shapes)} tensors")
        return Range(self.tensor_to_offset[i], self._numels[i])

    def get_segment_range(self, k: int) -> Range:
        """Where segment ``k`` lies in the buffer. ``IndexError`` outside ``[0, dp_size)``."""
        numel = self.rank_size(k)
        return Range(self.rank_to_offset[k], numel)

    def get_row_range(self, i: int, held: Range) -> Range:
        """The rows of tensor ``i`` inside ``held`` (a range of the buffer): first row and number of rows.

        With no row inside, the start is the number of rows that lie before ``held``. Local arithmetic, no collective.
        ``RuntimeError`` if ``held`` cuts a row, ``ValueError`` for a 0-D tensor or rows of 0 elements.
        """
        tensor, shape = self.get_tensor_range(i), self.tensor_shapes[i]
        row = _block_numel(i, shape, 1)
        before = min(max(held.start - tensor.start, 0), tensor.numel)
        owned = intersect_ranges(tensor, held).numel
        if owned % row or (owned and before % row):
            raise RuntimeError(
                f"[{held.start}, {held.end}) cuts a row of tensor {i}: it holds {owned} elements from element {before} "
                f"on, and a row of shape {tuple(shape)} has {row}"
            )
        return Range(before // row, owned // row)

    def get_rank_range(self, mesh: DeviceMesh, placements: Sequence[Any], rank: int) -> Range:
        """The part of the buffer that global rank ``rank`` holds: one run of consecutive segments.

        ``placements`` has one entry per mesh axis, outermost first. The innermost sharded axis is the most significant
        digit of the shard number, the outermost the least: on an (M, N) mesh sharded on both axes, coordinate (i, j)
        holds segment ``j * M + i``, a slice of what it held when only the inner axis was sharded. (DTensor's
        ``[Shard(0), Shard(0)]`` counts the other way round.) No collective; reads ``mesh.mesh`` and ``mesh.ndim``.

        ``ValueError``: the number of placements is not ``mesh.ndim``, the rank is not in the mesh, or the number of
        segments is not a multiple of the number of shards. ``TypeError``: a placement that is not ``Shard`` (or a
        subclass), ``Replicate`` or ``Partial``.
        """
        # Imported here: a layout is planned and drawn without torch.distributed.
        from torch.distributed.tensor import Partial, Replicate, Shard

        if len(placements) != mesh.ndim:
            raise ValueError(f"the mesh has {mesh.ndim} axes, but there are {len(placements)} placements: {placements}")
        coordinates = (mesh.mesh == rank).nonzero().tolist()
        if not coordinates:
            raise ValueError(f"rank {rank} is not in the mesh {mesh.mesh.tolist()}")
        index, shards = 0, 1
        axes: list[int] = []
        for axis in reversed(range(mesh.ndim)):
            if isinstance(placements[axis], Shard):
                index = index * mesh.mesh.size(axis) + coordinates[0][axis]
                shards *= mesh.mesh.size(axis)
                axes.insert(0, axis)
            elif not isinstance(placements[axis], Replicate | Partial):
                raise TypeError(
                    f"placement {placements[axis]!r} of mesh axis {axis} is not understood: use Shard (or a subclass), "
                    "Replicate or Partial"
                )
        if self.dp_size % shards:
            raise ValueError(
                f"the layout has {self.dp_size} segments, which cannot be dealt to {shards} shards (mesh axes {axes}): "
                "plan with dp_size a multiple of the number of shards"
            )
        per_shard = self.dp_size // shards
        first, last = index * per_shard, (index + 1) * per_shard - 1
        start = self.rank_to_offset[first]
        return Range(start, self.rank_to_offset[last] + self.rank_size(last) - start)

    def get_local_range(self, mesh: DeviceMesh, placements: Sequence[Any]) -> Range:
        """``get_rank_range`` of this process (global rank 0 when there is no process group). No collective."""
        import torch.distributed as dist

        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return self.get_rank_range(mesh, placements, rank)

    # ---- validators --------------------------------------------------------------------------------------------

    def validate_for_row_atomic(self, *, block_size: int = 1) -> None:
        """``ValueError`` unless segments are equal and start, like the tensors, on multiples of the rows (blocks).

        Judges the stored offsets, however they were made. The layouts of ``plan_compact`` need not pass.
        """
        if block_size <= 0:
            raise ValueError(f"block_size counts rows and must be positive, not {block_size}")
        if not self.has_equal_shard_sizes:
            sizes = [self.rank_size(k) for k in range(self.dp_size)]
            raise ValueError(f"a row-atomic layout needs segments of equal length, but they are {sizes}")
        chunk = 1
        for i, (shape, offset) in enumerate(zip(self.tensor_shapes, self.tensor_to_offset, strict=True)):
            alignment = _block_numel(i, shape, block_size)
            if offset % alignment:
                raise ValueError(
                    f"tensor {i} of shape {tuple(shape)} starts at {offset}, which is not a multiple of {alignment} "
                    f"(block of {block_size} rows)"
                )
            chunk = math.lcm(chunk, alignment)
        for k, start in enumerate(self.rank_to_offset):
            if start % chunk:
                raise ValueError(f"segment {k} starts at {start}, which is not a multiple of the chunk size {chunk}")

    def validate_for_tensor_atomic(self) -> None:
        """``ValueError`` unless each non-empty tensor ends inside the segment that holds its first element."""
        for i, (offset, n) in enumerate(zip(self.tensor_to_offset, self._numels, strict=True)):
            if n == 0:
                continue
            k = bisect_right(self.rank_to_offset, offset) - 1
            end = self.rank_to_offset[k] + self.rank_size(k)
            if offset + n > end:
                raise ValueError(
                    f"tensor {i} at [{offset}, {offset + n}) is cut: it leaves segment {k}, which ends at {end}"
                )

    # ---- builders ----------------------------------------------------------------------------------------------

    @classmethod
    def build_for_row_atomic(cls, shapes: Iterable[Shape], dp_size: int, *, block_size: int = 1) -> GlobalLayout:
        """Equal segments whose boundaries fall between rows (blocks of ``block_size`` rows) of every tensor.

        Every tensor starts on a multiple of its own row (block), every segment on a multiple of all of them (a chunk),
        and ``size`` is a multiple of ``chunk * dp_size``. Offsets do not depend on ``dp_size``.

        ``ValueError``: ``dp_size`` or ``block_size`` not positive; then in id order a 0-D shape, rows of 0 elements, a
        dim 0 that is not a multiple of ``block_size`` (0 is one).
        """
        check_dp_size(dp_size)
        sizes = [torch.Size(shape) for shape in shapes]
        alignments = block_numels(sizes, block_size)
        chunk = math.lcm(*alignments)
        offsets, end = pack_in_chunks([shape.numel() for shape in sizes], alignments, chunk)
        size = _pad_to_multiple(end, chunk * dp_size)
        layout = cls(sizes, offsets, size, (k * (size // dp_size) for k in range(dp_size)))
        layout.validate_for_row_atomic(block_size=block_size)
        return layout

    @classmethod
    def build_for_tensor_atomic(
        cls, shapes: Iterable[Shape], dp_size: int, *, tensor_owners: Iterable[int]
    ) -> GlobalLayout:
        """Every tensor whole in the segment its owner names; no gaps, no padding, segments of any length.

        ``tensor_owners`` has one segment (not a global rank) per tensor. ``ValueError``: ``dp_size`` not positive, a
        different number of owners than tensors, an owner that is not a plain int in ``[0, dp_size)``.
        """
        check_dp_size(dp_size)
        sizes = [torch.Size(shape) for shape in shapes]
        owners = list(tensor_owners)
        if len(owners) != len(sizes):
            raise ValueError(f"{len(sizes)} tensors need as many owners, but there are {len(owners)}")
        for i, owner in enumerate(owners):
            if type(owner) is not int or not 0 <= owner < dp_size:
                raise ValueError(f"owner {owner!r} of tensor {i} is not a segment: give an int in [0, {dp_size})")
        lengths = [0] * dp_size
        for owner, shape in zip(owners, sizes, strict=True):
            lengths[owner] += shape.numel()
        *starts, size = accumulate(lengths, initial=0)
        cursors, offsets = list(starts), []
        for owner, shape in zip(owners, sizes, strict=True):
            offsets.append(cursors[owner])
            cursors[owner] += shape.numel()
        layout = cls(sizes, offsets, size, starts)
        layout.validate_for_tensor_atomic()
        return layout


def pack_in_chunks(numels: Sequence[int], alignments: Sequence[int], chunk: int) -> tuple[list[int], int]:
    """Offsets of the documented row-atomic builder, and the end of the last tensor; independent of ``dp_size``.

    A tensor of at least a chunk is *regular* and starts on a chunk; what is left of its last chunk is a gap. The gap
    takes the head of one other regular, placed so that its tail ends on a chunk, then whatever *fragments* (tensors
    shorter than a chunk, largest first) fit. The other fragments follow the last regular.
    """
    offsets = [0] * len(numels)
    regulars = [i for i, n in enumerate(numels) if n >= chunk]
    fragments = sorted((i for i, n in enumerate(numels) if n < chunk), key=lambda i: -numels[i])
    cursor = 0
    while regulars:
        i = regulars.pop(0)
        offsets[i] = cursor
        gap_start = cursor + numels[i]
        cursor = gap_end = _pad_to_multiple(gap_start, chunk)
        if gap_start == gap_end:
            continue
        surplus = numels[i] % chunk
        conjugate = next((j for j in regulars if numels[j] % chunk and surplus + numels[j] % chunk <= chunk), None)
        if conjugate is not None:
            regulars.remove(conjugate)
            gap_end -= numels[conjugate] % chunk
            offsets[conjugate] = gap_end
            cursor += numels[conjugate] // chunk * chunk
        waiting = []
        for j in fragments:
            start = _pad_to_multiple(gap_start, alignments[j])
            if start + numels[j] <= gap_end:
                offsets[j] = start
                gap_start = start + numels[j]
            else:
                waiting.append(j)
        fragments = waiting
    for j in fragments:
        offsets[j] = _pad_to_multiple(cursor, alignments[j])
        cursor = offsets[j] + numels[j]
    return offsets, cursor
