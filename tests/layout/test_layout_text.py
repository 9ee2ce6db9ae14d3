"""Layouts drawn as text."""

import pytest
from expecttest import assert_expected_inline
from layout_groups import DOCUMENTED

from fxshard.layout import GlobalLayout
from fxshard.layout_text import draw_layout


def test_printing_the_documented_example_shows_rows_holes_and_padding():
    assert_expected_inline(
        str(GlobalLayout.build_for_row_atomic(DOCUMENTED, 5)),
        """\
5 tensors in 5 segments of 12 elements: 52 used + 8 wasted = 60, waste 15.4%
shard 0  [ 0, 12)  P0 rows 0-1 [0, 12)
shard 1  [12, 24)  P1 rows 0-2 [12, 24)
shard 2  [24, 36)  P1 row 3 [24, 28), P3 row 0 [28, 30), hole of 2, P2 row 0 [32, 36)
shard 3  [36, 48)  P2 rows 1-3 [36, 48)
shard 4  [48, 60)  P4 row 0 [48, 54), padding of 6""",
    )


def test_uneven_segments_and_tensors_without_rows_are_drawn():
    layout = GlobalLayout.build_for_tensor_atomic([(2, 2), (), (0, 3), (3,)], 3, tensor_owners=[2, 0, 1, 0])
    assert_expected_inline(
        draw_layout(layout, names=["weight", "scale", "nothing", "bias"]),
        """\
4 tensors in 3 segments of 0 to 4 elements: 8 used + 0 wasted = 8, waste 0.0%
shard 0  [0, 4)  scale element 0 [0, 1), bias rows 0-2 [1, 4)
shard 1  [4, 4)  empty
shard 2  [4, 8)  weight rows 0-1 [4, 8)""",
    )


def test_a_cut_row_is_drawn_in_elements():
    assert_expected_inline(
        str(GlobalLayout([(2, 4)], [1], 12, [0, 6])),
        """\
1 tensor in 2 segments of 6 elements: 8 used + 4 wasted = 12, waste 50.0%
shard 0  [ 0,  6)  hole of 1, P0 elements 0-4 [1, 6)
shard 1  [ 6, 12)  P0 elements 5-7 [6, 9), padding of 3""",
    )


def test_the_middle_of_a_huge_layout_is_left_out():
    layout = GlobalLayout.build_for_row_atomic([(4,)] * 5000, 1000)
    assert_expected_inline(
        draw_layout(layout, max_segments=3, max_pieces=4),
        """\
5000 tensors in 1000 segments of 20 elements: 20,000 used + 0 wasted = 20,000, waste 0.0%
shard   0  [    0,    20)  P0 rows 0-3 [0, 4), P1 rows 0-3 [4, 8), ... 1 more ..., P3 rows 0-3 [12, 16), P4 rows 0-3 [16, 20)
shard   1  [   20,    40)  P5 rows 0-3 [20, 24), P6 rows 0-3 [24, 28), ... 1 more ..., P8 rows 0-3 [32, 36), P9 rows 0-3 [36, 40)
... 997 more shards ...
shard 999  [19980, 20000)  P4995 rows 0-3 [19980, 19984), P4996 rows 0-3 [19984, 19988), ... 1 more ..., P4998 rows 0-3 [19992, 19996), P4999 rows 0-3 [19996, 20000)""",  # noqa: E501
    )
    assert len(str(layout).splitlines()) == 18


def test_an_empty_layout_is_drawn():
    assert_expected_inline(
        str(GlobalLayout([], [], 0, [0])),
        """\
0 tensors in 1 segment of 0 elements: 0 used + 0 wasted = 0, waste 0.0%
shard 0  [0, 0)  empty""",
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"names": ["a"]}, "5 tensors, but there are 1 names"),
        ({"max_segments": 1}, r"max_segments \(1\) .* at least 2"),
        ({"max_pieces": 0}, r"max_pieces \(0\) must be at least 2"),
    ],
)
def test_options_that_make_no_drawing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        draw_layout(GlobalLayout.build_for_row_atomic(DOCUMENTED, 5), **options)
