"""Which segments a rank of a device mesh holds."""

from types import SimpleNamespace

import pytest
import torch
from layout_groups import DOCUMENTED
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fxshard.layout import GlobalLayout, Range
from fxshard.placement import BlockAtomic, RowAtomic, TensorAtomic

row_atomic = GlobalLayout.build_for_row_atomic
R, S, P = Replicate(), Shard(0), Partial()

TWELVE_ROWS = row_atomic([(12, 2)], 6)
PADDED = row_atomic([(5, 4), (2, 6), (3,)], 6)
EIGHT = row_atomic([(8, 1)], 8)
UNEVEN = GlobalLayout([], [], 10, [0, 4, 6, 9])


def owned_by(dp_size: int) -> GlobalLayout:
    shapes = [(4, 4), (3,), (2, 6), (7, 3)]
    return GlobalLayout.build_for_tensor_atomic(shapes, dp_size, tensor_owners=[1, 3, 0, 3])


def mesh(*sizes: int, first: int = 0) -> DeviceMesh:
    count = torch.Size(sizes).numel()
    return DeviceMesh("cpu", torch.arange(first, first + count).reshape(sizes), _init_backend=False, _rank=first)


def even(starts: list[int], numel: int) -> list[tuple[int, int]]:
    return [(start, numel) for start in starts]


@pytest.mark.parametrize(
    "layout, sizes, placements, ranges",
    [
        (TWELVE_ROWS, (2, 3), [S, S], even([0, 8, 16, 4, 12, 20], 4)),
        (TWELVE_ROWS, (2, 3), [R, S], even([0, 8, 16] * 2, 8)),
        (TWELVE_ROWS, (2, 3), [P, S], even([0, 8, 16] * 2, 8)),
        (TWELVE_ROWS, (2, 3), [R, R], even([0] * 6, 24)),
        (TWELVE_ROWS, (2, 3), [S, R], even([0] * 3 + [12] * 3, 12)),
        (PADDED, (2, 3), [S, S], even([0, 24, 48, 12, 36, 60], 12)),
        (PADDED, (3, 2), [S, S], even([0, 36, 12, 48, 24, 60], 12)),
        (PADDED, (3, 2), [R, S], even([0, 36] * 3, 36)),
        (row_atomic(DOCUMENTED, 4), (2, 2), [S, S], even([0, 48, 24, 72], 24)),
        (row_atomic(DOCUMENTED, 5), (5,), [S], even([0, 12, 24, 36, 48], 12)),
        (EIGHT, (2, 2, 2), [S, S, S], even([0, 4, 2, 6, 1, 5, 3, 7], 1)),
        (EIGHT, (2, 2, 2), [R, S, S], even([0, 4, 2, 6] * 2, 2)),
        (EIGHT, (2, 2, 2), [R, R, S], even([0, 4] * 4, 4)),
        (UNEVEN, (2, 2), [S, S], [(0, 4), (6, 3), (4, 2), (9, 1)]),
        (UNEVEN, (2, 2), [R, S], [(0, 6), (6, 4)] * 2),
        (owned_by(4), (2, 2), [S, S], [(0, 12), (28, 0), (12, 16), (28, 24)]),
        (owned_by(5), (5,), [S], [(0, 12), (12, 16), (28, 0), (28, 24), (52, 0)]),
        (row_atomic([(8, 4)], 8), (4,), [S], even([0, 8, 16, 24], 8)),
        (row_atomic([(6, 4)], 2), (4,), [R], even([0] * 4, 24)),
    ],
)
def test_ranks_hold_the_golden_ranges(layout, sizes, placements, ranges):
    found = [layout.get_rank_range(mesh(*sizes), placements, rank) for rank in range(torch.Size(sizes).numel())]
    assert found == [Range(*expected) for expected in ranges]


def test_ranks_are_global_so_a_mesh_may_start_anywhere():
    layout = row_atomic([(4, 1)], 4)
    assert [layout.get_rank_range(mesh(2, 2, first=4), [S, S], rank).start for rank in (4, 5, 6, 7)] == [0, 2, 1, 3]
    with pytest.raises(ValueError, match=r"rank 0 is not in the mesh \[\[4, 5\], \[6, 7\]\]"):
        layout.get_rank_range(mesh(2, 2, first=4), [S, S], 0)


@pytest.mark.parametrize("placement", [RowAtomic(), BlockAtomic(2), TensorAtomic()])
def test_the_placements_of_flat_buffers_count_as_sharded(placement):
    assert TWELVE_ROWS.get_rank_range(mesh(2, 3), [R, placement], 4) == Range(8, 8)


def test_a_segment_count_that_cannot_be_dealt_is_refused_with_its_axes():
    with pytest.raises(ValueError, match=r"2 segments, which cannot be dealt to 4 shards \(mesh axes \[0\]\)"):
        row_atomic([(4,)], 2).get_rank_range(mesh(4), [S], 0)


def test_every_mesh_axis_needs_a_placement():
    with pytest.raises(ValueError, match="2 axes, but there are 1 placements"):
        TWELVE_ROWS.get_rank_range(mesh(2, 3), [S], 0)


def test_a_strided_shard_is_refused_rather_than_taken_for_replicated():
    with pytest.raises(TypeError, match="of mesh axis 0 is not understood"):
        TWELVE_ROWS.get_rank_range(mesh(2, 3), [_StridedShard(0, split_factor=3), S], 0)


def test_without_a_process_group_this_process_is_rank_zero():
    layout = row_atomic([(3, 2)], 1)
    assert layout.get_local_range(SimpleNamespace(mesh=torch.tensor([0]), ndim=1), [S]) == Range(0, 6)


def test_this_process_holds_the_range_of_its_global_rank(fake_world):
    with fake_world(6, rank=3):
        assert TWELVE_ROWS.get_local_range(mesh(2, 3), [S, S]) == Range(4, 4)


@pytest.mark.parametrize("sizes", [(6,), (2, 3), (3, 2), (1, 6), (3, 1, 2)])
def test_fully_sharded_ranks_partition_the_buffer(sizes):
    ranges = sorted(
        (TWELVE_ROWS.get_rank_range(mesh(*sizes), [S] * len(sizes), rank) for rank in range(6)),
        key=lambda held: held.start,
    )
    assert [held.start for held in ranges] + [24] == [0] + [held.end for held in ranges]


def test_sharding_the_outer_axis_too_takes_a_slice_of_what_the_rank_holds():
    for rank in range(6):
        inner = TWELVE_ROWS.get_rank_range(mesh(2, 3), [R, S], rank)
        both = TWELVE_ROWS.get_rank_range(mesh(2, 3), [S, S], rank)
        assert inner.start <= both.start and both.end <= inner.end
