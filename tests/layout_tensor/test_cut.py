"""Cuts in one process: which rows each rank owns, and what a cut refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from sharded_cases import storage_shape
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fxshard.cut import Cut
from fxshard.layout import GlobalLayout
from fxshard.placement import RowAtomic, TensorAtomic

DOCUMENTED = [(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)]


def mesh_without_groups(mesh: object, rank: int) -> DeviceMesh:
    return DeviceMesh("cpu", mesh, _init_backend=False, _rank=rank)


def documented_cut(rank: int, index: int) -> Cut:
    layout = GlobalLayout.build_for_row_atomic(DOCUMENTED, 5)
    return Cut(mesh_without_groups(range(5), rank), layout, index, 0, torch.Size(DOCUMENTED[index]), RowAtomic())


def cut_along(dim: int, shape: tuple[int, ...] = (2, 3, 5), ranks: int = 2, rank: int = 0) -> Cut:
    layout = GlobalLayout.build_for_row_atomic([storage_shape(shape, dim)], ranks)
    return Cut(mesh_without_groups(range(ranks), rank), layout, 0, dim, torch.Size(shape), Shard(dim))


@pytest.mark.parametrize("rank", range(5))
def test_every_rank_owns_the_documented_rows(rank):
    counts = [(2, 0, 0, 0, 0), (0, 3, 0, 0, 0), (0, 1, 1, 1, 0), (0, 0, 3, 0, 0), (0, 0, 0, 0, 1)][rank]
    for index, count in enumerate(counts):
        cut = documented_cut(rank, index)
        assert cut.own_rows[1] == count
        assert cut.own_shape == cut.local_shape(rank) == (count, DOCUMENTED[index][1])


def test_a_rank_without_rows_starts_after_the_rows_below_it():
    assert [documented_cut(0, 2).rows(rank) for rank in range(5)] == [(0, 0), (0, 0), (0, 1), (1, 3), (4, 0)]


def test_rows_run_along_the_cut_dim():
    cut = cut_along(2)
    assert cut.storage_shape == (5, 2, 3)
    assert [cut.rows(rank) for rank in range(2)] == [(0, 3), (3, 2)]
    assert [cut.local_shape(rank) for rank in range(2)] == [(2, 3, 3), (2, 3, 2)]


def test_on_a_2d_mesh_the_last_coordinate_is_the_shard_rank():
    layout = GlobalLayout.build_for_row_atomic([(4, 2)], 2)
    for rank, coordinate in ((0, 0), (1, 1), (2, 0), (3, 1)):
        cut = Cut(mesh_without_groups([[0, 1], [2, 3]], rank), layout, 0, 0, torch.Size((4, 2)), RowAtomic())
        assert (cut.shard_rank, cut.shard_world) == (coordinate, 2)
        assert cut.placements == (Replicate(), RowAtomic())


def test_cuts_are_compared_and_hashed_by_value():
    assert documented_cut(0, 1) == documented_cut(0, 1) != documented_cut(0, 2)
    assert hash(documented_cut(0, 1)) == hash(documented_cut(0, 1))
    assert cut_along(0, (4, 4)) != cut_along(1, (4, 4))


def test_a_deep_copy_of_a_cut_is_the_cut():
    cut = cut_along(0)
    assert copy.deepcopy(cut) is cut


def test_torch_utilities_are_told_the_true_rows_by_the_placements():
    for rank in range(5):
        for index in range(5):
            cut = documented_cut(rank, index)
            shape, offset = compute_local_shape_and_global_offset(cut.shape, cut.mesh, cut.placements)
            assert shape == cut.own_shape
            if cut.own_rows[1]:
                assert offset == (cut.own_rows[0], 0)
    assert cut_along(1).placements == (Shard(1),)


def test_a_whole_tensor_belongs_to_its_owner():
    layout = GlobalLayout.build_for_tensor_atomic([(4, 4), (2, 6)], 2, tensor_owners=[1, 0])
    cut = Cut(mesh_without_groups(range(2), 0), layout, 0, 0, torch.Size((4, 4)), TensorAtomic())
    assert cut.all_rows == ((0, 0), (0, 4))


def test_a_process_outside_the_mesh_owns_no_rows():
    layout = GlobalLayout.build_for_row_atomic([(4, 2)], 2)
    cut = Cut(mesh_without_groups([0, 1], 7), layout, 0, 0, torch.Size((4, 2)), RowAtomic())
    with pytest.raises(RuntimeError, match="not part of the mesh"):
        _ = cut.own_rows


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mesh": mesh_without_groups(range(3), 0)}, "2 segments, but the shard dim of the mesh has 3"),
        ({"mesh": mesh_without_groups([[[0, 1]]], 0)}, "mesh of 1 dim .* not of 3"),
        ({"dim": 2}, "along dim 2: choose a dim from 0 to 1"),
        ({"dim": -1}, "along dim -1"),
        ({"shape": torch.Size(())}, "reshape a 0-D tensor"),
        ({"shape": torch.Size((2, 4))}, r"stored as \(2, 4\), but tensor 0 of the layout has shape \(4, 2\)"),
        ({"dim": 1}, "names another dim"),
    ],
)
def test_contradictions_are_refused(change, message):
    layout = GlobalLayout.build_for_row_atomic([(4, 2)], 2)
    fields = {
        "mesh": mesh_without_groups(range(2), 0), "layout": layout, "index": 0, "dim": 0, "shape": torch.Size((4, 2)),
        "placement": RowAtomic(),
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        Cut(**fields)


def test_a_segment_that_cuts_a_row_is_refused():
    layout = GlobalLayout([(4, 2)], [0], 8, [0, 3])
    cut = Cut(mesh_without_groups(range(2), 0), layout, 0, 0, torch.Size((4, 2)), RowAtomic())
    with pytest.raises(RuntimeError, match="cuts a row"):
        cut.rows(0)
