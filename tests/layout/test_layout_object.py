"""The layout as a value: what its constructor accepts, what it answers, that it compares and copies by value."""

import inspect
import math
import pickle

import numpy
import pytest
import torch
from layout_groups import DOCUMENTED

import fxshard.layout as layout_module
from fxshard.layout import GlobalLayout, Range, _pad_to_multiple, block_numels, intersect_ranges, non_leading_numel


@pytest.mark.parametrize(
    "fields, message",
    [
        (([(4,)], [0, 1], -1, []), "size must not be negative"),
        (([(4,)], [0, 1], 4, []), "1 shapes need as many offsets, but there are 2"),
        (([(4,)], [-1], 4, []), "at least one segment"),
        (([(4,)], [-1], 4, [1, 4]), "first segment starts at 0, not at 1"),
        (([(4,)], [-1], 4, [0, 6, 5]), "last segment starts at 5, after the end"),
        (([(4,)], [-1], 8, [0, 6, 4]), "segment 2 starts at 4, before segment 1"),
        (([(4,), (9,)], [-1, 0], 8, [0]), "tensor 0 has a negative offset"),
        (([(4,), (2,)], [5, -1], 8, [0]), "tensor 0 ends at 9, after the end"),
        (([(4,), (2,)], [0, 3], 8, [0]), "tensors 0 and 1 overlap"),
        (([(2,), (4,)], [3, 0], 8, [0]), "tensors 1 and 0 overlap"),
        (([(0,)], [5], 4, [0]), "tensor 0 ends at 5"),
    ],
)
def test_contradicting_fields_are_refused_and_the_first_contradiction_is_named(fields, message):
    with pytest.raises(AssertionError, match=message):
        GlobalLayout(*fields)


@pytest.mark.parametrize(
    "shapes, offsets, size",
    [
        ([(4,), (0,)], [0, 2], 4),
        ([(0,), (4,), (0, 3)], [4, 0, 4], 4),
        ([(0,), (0,)], [0, 0], 0),
        ([(4,), (0,), (4,)], [0, 4, 4], 8),
    ],
)
def test_tensors_without_elements_overlap_nothing(shapes, offsets, size):
    assert GlobalLayout(shapes, offsets, size, [0]).tensor_to_offset == tuple(offsets)


def test_any_iterables_are_converted_to_tuples_of_sizes_and_ints():
    layout = GlobalLayout(([2, 3] for _ in range(1)), iter([numpy.int64(1)]), numpy.int64(8), range(0, 8, 4))
    assert layout == GlobalLayout((torch.Size([2, 3]),), (1,), 8, (0, 4))
    assert type(layout.tensor_shapes[0]) is torch.Size
    assert {type(n) for n in (*layout.tensor_to_offset, layout.size, *layout.rank_to_offset)} == {int}
    with pytest.raises(TypeError):
        GlobalLayout([(2,)], [0.5], 4, [0])


def test_layouts_are_immutable_hashable_values_that_survive_pickling():
    first, second = (GlobalLayout.build_for_row_atomic(DOCUMENTED, 5) for _ in range(2))
    assert first.used == 52  # a cached value is no part of the state
    copy = pickle.loads(pickle.dumps(first))
    assert first == second == copy and {first: "found"}[copy] == "found"
    assert first != GlobalLayout.build_for_row_atomic(DOCUMENTED, 4)
    with pytest.raises(AttributeError):
        first.size = 3  # type: ignore[misc]


def test_sizes_and_ranges_of_an_uneven_layout():
    layout = GlobalLayout([(2, 3), (0,), (4,)], [0, 6, 6], 12, [0, 6, 6])
    assert [layout.rank_size(k) for k in range(3)] == [6, 0, 6]
    assert [layout.get_segment_range(k) for k in range(3)] == [Range(0, 6), Range(6, 0), Range(6, 6)]
    assert [layout.get_tensor_range(i) for i in range(3)] == [Range(0, 6), Range(6, 0), Range(6, 4)]
    assert not layout.has_equal_shard_sizes
    assert (layout.dp_size, layout.used, layout.waste, layout.chunk_size()) == (3, 10, pytest.approx(0.2), 3)


@pytest.mark.parametrize("starts, equal", [([0], True), ([0, 0, 0], False), ([0, 4, 8], True), ([0, 4, 4], False)])
def test_segments_are_equal_when_all_have_one_length(starts, equal):
    assert GlobalLayout([(12,)], [0], 12, starts).has_equal_shard_sizes is equal


def test_empty_layouts_have_equal_segments_and_no_waste():
    layout = GlobalLayout([], [], 0, [0, 0, 0])
    assert layout.has_equal_shard_sizes and layout.waste == 0.0 and layout.chunk_size() == 1
    assert GlobalLayout([], [], 4, [0]).waste == math.inf


@pytest.mark.parametrize("bad", [-1, 5])
def test_ids_and_segments_that_do_not_exist_raise_index_errors(bad):
    layout = GlobalLayout.build_for_row_atomic(DOCUMENTED, 5)
    for query in (layout.rank_size, layout.get_segment_range, layout.get_tensor_range):
        with pytest.raises(IndexError, match=f"{bad} does not exist"):
            query(bad)


@pytest.mark.parametrize(
    "first, second, both",
    [
        (Range(0, 4), Range(2, 6), Range(2, 2)),
        (Range(2, 6), Range(0, 4), Range(2, 2)),
        (Range(0, 9), Range(3, 2), Range(3, 2)),
        (Range(0, 4), Range(4, 2), Range(4, 0)),
        (Range(0, 4), Range(7, 2), Range(7, 0)),
        (Range(7, 2), Range(0, 4), Range(7, 0)),
    ],
)
def test_ranges_intersect_and_disjoint_ones_keep_the_later_start(first, second, both):
    assert intersect_ranges(first, second) == both
    assert both.end == both.start + both.numel


@pytest.mark.parametrize("shape, row", [((8, 2, 3), 6), ((7,), 1), ((0, 4), 4), ((3, 0), 0)])
def test_row_size_is_the_product_of_the_dims_after_the_first(shape, row):
    assert non_leading_numel(shape) == row


def test_shapes_without_dims_have_no_rows():
    with pytest.raises(ValueError, match="0-D shapes are not supported"):
        non_leading_numel(())


@pytest.mark.parametrize("value, multiple, padded", [(0, 12, 0), (12, 12, 12), (13, 12, 24), (54, 60, 60)])
def test_rounding_up_to_a_multiple(value, multiple, padded):
    assert _pad_to_multiple(value, multiple) == padded


@pytest.mark.parametrize("multiple", [0, -3])
def test_rounding_to_a_multiple_that_is_not_positive_is_refused(multiple):
    with pytest.raises(ValueError, match=f"positive multiple, not to {multiple}"):
        _pad_to_multiple(4, multiple)


def test_block_sizes_are_one_for_all_or_one_per_tensor():
    assert block_numels([(4, 3), (6,)], 2) == (6, 2)
    assert block_numels([(4, 3), (6,)], (4, 3)) == (12, 3)
    with pytest.raises(ValueError, match="2 tensors need one block size or as many, but there are 3"):
        block_numels([(4, 3), (6,)], (1, 1, 1))


@pytest.mark.parametrize(
    "held, rows",
    [
        (Range(0, 4), Range(0, 0)),
        (Range(0, 6), Range(0, 1)),
        (Range(6, 4), Range(1, 2)),
        (Range(8, 0), Range(2, 0)),
        (Range(12, 8), Range(4, 0)),
    ],
)
def test_an_empty_shard_reports_the_rows_before_it(held, rows):
    assert GlobalLayout([(4, 2)], [4], 20, [0]).get_row_range(0, held) == rows


@pytest.mark.parametrize("held", [Range(0, 5), Range(5, 2), Range(5, 9)])
def test_a_range_that_cuts_a_row_has_no_rows(held):
    with pytest.raises(RuntimeError, match="cuts a row of tensor 0"):
        GlobalLayout([(4, 2)], [4], 20, [0]).get_row_range(0, held)


@pytest.mark.parametrize("shape", [(), (3, 0)])
def test_tensors_without_rows_have_no_row_range(shape):
    with pytest.raises(ValueError, match="tensor 0"):
        GlobalLayout([shape], [0], 4, [0]).get_row_range(0, Range(0, 4))


def test_checks_survive_python_O():
    source = inspect.getsource(layout_module)
    optimised = {"__name__": layout_module.__name__}
    exec(compile(source, layout_module.__file__, "exec", optimize=1), optimised)
    with pytest.raises(AssertionError, match="overlap"):
        optimised["GlobalLayout"]([(4,), (2,)], [0, 3], 8, [0])
