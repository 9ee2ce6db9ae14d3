"""Whole tensors in the segments of their owners."""

import math
from random import Random

import pytest
from layout_groups import segments

from fxshard.layout import GlobalLayout, intersect_ranges

build = GlobalLayout.build_for_tensor_atomic


@pytest.mark.parametrize(
    "shapes, dp_size, owners, offsets, size, starts, lengths",
    [
        ([(4, 4), (2, 6), (1, 2)], 2, [0, 1, 1], (0, 16, 28), 30, (0, 16), [16, 14]),
        ([(4, 4), (3,), (2, 6), (7, 3)], 5, [1, 3, 0, 3], (12, 28, 0, 31), 52, (0, 12, 28, 28, 52), [12, 16, 0, 24, 0]),
        ([(2, 3), (2, 3)], 2, [0, 1], (0, 6), 12, (0, 6), [6, 6]),
        ([(0, 4), (3,)], 2, [0, 1], (0, 0), 3, (0, 0), [0, 3]),
        ([(0, 4), (3,)], 2, [1, 0], (3, 0), 3, (0, 3), [3, 0]),
        ([(3,), (4,)], 1, [0, 0], (0, 3), 7, (0,), [7]),
        ([], 2, [], (), 0, (0, 0), [0, 0]),
        ([(2, 2), (), (0, 3), (3,)], 3, [2, 0, 1, 0], (4, 0, 4, 1), 8, (0, 4, 4), [4, 0, 4]),
    ],
)
def test_tensors_are_packed_tight_in_their_owners_segments(shapes, dp_size, owners, offsets, size, starts, lengths):
    layout = build(shapes, dp_size, tensor_owners=owners)
    assert (layout.tensor_to_offset, layout.size, layout.rank_to_offset) == (offsets, size, starts)
    assert [layout.rank_size(k) for k in range(dp_size)] == lengths
    assert layout.has_equal_shard_sizes is (len(set(lengths)) == 1)
    assert layout.waste == 0.0


@pytest.mark.parametrize("owners", [[-1, 0], [2, 0], [0.5, 0], [True, 0], ["0", 0], [None, 0]])
def test_owners_that_are_not_segments_are_refused(owners):
    with pytest.raises(ValueError, match=r"owner .* of tensor 0 is not a segment: give an int in \[0, 2\)"):
        build([(2,), (2,)], 2, tensor_owners=owners)


@pytest.mark.parametrize(
    "dp_size, owners, message", [(0, [None], "dp_size"), (2, [None], "2 tensors need as many owners, but there are 1")]
)
def test_the_first_fault_is_named(dp_size, owners, message):
    with pytest.raises(ValueError, match=message):
        build([(2,), (2,)], dp_size, tensor_owners=owners)


def test_the_validator_refuses_a_tensor_that_leaves_its_segment():
    with pytest.raises(ValueError, match=r"tensor 1 at \[2, 6\) is cut: it leaves segment 1, which ends at 4"):
        GlobalLayout([(2,), (4,)], [0, 2], 6, [0, 2, 4]).validate_for_tensor_atomic()


def test_the_validator_skips_empty_tensors_and_empty_segments():
    GlobalLayout([(0,), (2,), (4,)], [1, 0, 2], 6, [0, 2, 2, 6]).validate_for_tensor_atomic()


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_owner_maps_place_every_tensor_whole_with_its_owner(count):
    random = Random(2)
    for _ in range(count):
        shapes = [tuple(random.randint(0, 4) for _ in range(random.randint(0, 3))) for _ in range(random.randint(0, 8))]
        dp_size = random.randint(1, 6)
        owners = [random.randrange(dp_size) for _ in shapes]
        layout = build(shapes, dp_size, tensor_owners=owners)
        assert layout.size == sum(map(math.prod, shapes))
        for i, owner in enumerate(owners):
            held = [intersect_ranges(layout.get_tensor_range(i), part).numel for part in segments(layout)]
            assert held[owner] == sum(held) == math.prod(shapes[i])
