"""The compact planner: legal cuts, bounded waste, aligned starts; splitting by row size and saying why."""

import math
import time
from itertools import chain, product
from random import Random

import pytest
from layout_groups import BLOCKS, DOCUMENTED, SHARDS, block_of, check_row_atomic, random_groups

from fxshard.layout import GlobalLayout
from fxshard.layout_planner import (
    ALIGNMENT_COST,
    _blocks_before,
    compact_size_bound,
    plan_compact,
    split_by_row_family,
    validate_compact,
    waste_reason,
)


def padded_size(shapes, dp_size, block_size=1):
    return GlobalLayout.build_for_row_atomic(shapes, dp_size, block_size=block_size).size


def aligned(layout, align):
    return [offset % align == 0 for offset in layout.tensor_to_offset]


def split_waste(shapes, dp_size, buckets, **options):
    size = sum(plan_compact([shapes[i] for i in ids], dp_size, **options).size for ids in buckets)
    return size / sum(map(math.prod, shapes)) - 1


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_plans_are_legal_bounded_and_never_larger_than_the_padded_one(count):
    for shapes, block_size in random_groups(count, seed=4):
        for dp_size in SHARDS:
            layout = plan_compact(shapes, dp_size, block_sizes=block_size)
            check_row_atomic(layout, shapes, dp_size, block_size)
            assert layout.size <= padded_size(shapes, dp_size, block_size)
            assert layout.size <= compact_size_bound(shapes, dp_size, block_sizes=block_size)
            assert layout == plan_compact(shapes, dp_size, block_sizes=block_size)


@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_alignment_costs_no_more_than_its_share_and_never_passes_the_padded_plan(count):
    for shapes, block_size in random_groups(count, seed=5):
        for dp_size in SHARDS:
            plain = plan_compact(shapes, dp_size, block_sizes=block_size)
            layout = plan_compact(shapes, dp_size, block_sizes=block_size, align=4)
            check_row_atomic(layout, shapes, dp_size, block_size)
            assert layout.size <= min(
                padded_size(shapes, dp_size, block_size), plain.size + ALIGNMENT_COST * layout.used
            )


def test_every_tensor_has_a_block_size_of_its_own():
    shapes, blocks = [(6, 4), (7, 2), (8,)], [3, 1, 4]
    layout = plan_compact(shapes, 4, block_sizes=blocks)
    validate_compact(layout, blocks)
    for i, (shape, block) in enumerate(zip(shapes, blocks, strict=True)):
        for k in range(4):
            assert layout.get_row_range(i, layout.get_segment_range(k)).numel % block == 0, (shape, k)


def least_segment_of_all(shapes, dp_size):
    """The shortest legal segment, by trying every placement of every tensor."""
    tensors = sorted(((math.prod(shape), block_of(shape)) for shape in shapes), reverse=True)

    def fits(segment, tensors, taken):
        if not tensors:
            return True
        (numel, block), *others = tensors
        return any(
            not (taken >> start) & ((1 << numel) - 1) and fits(segment, others, taken | ((1 << numel) - 1) << start)
            for start in range(dp_size * segment - numel + 1)
            if all((b - start) % block == 0 for b in range((start // segment + 1) * segment, start + numel, segment))
        )

    segment = -(-sum(numel for numel, _ in tensors) // dp_size)
    while not fits(segment, tensors, 0):
        segment += 1
    return segment


def test_tiny_groups_are_nearly_always_packed_as_tightly_as_possible():
    random = Random(6)
    ratios = []
    for _ in range(300):
        shapes = [(random.randint(1, 5), random.randint(1, 4)) for _ in range(random.randint(1, 4))]
        dp_size = random.randint(1, 4)
        ratios.append(plan_compact(shapes, dp_size).rank_size(0) / least_segment_of_all(shapes, dp_size))
    assert min(ratios) == 1.0
    assert sum(ratio == 1.0 for ratio in ratios) >= 0.9 * len(ratios)
    assert max(ratios) <= 1.5


@pytest.mark.parametrize(
    "group, dp_size, most",
    [("Llama-2-7B", 8, 0.0002), ("MLP", 8, 0.042), ("MLP", 2, 0.0005), ("conv", 8, 0.0051), ("conv", 2, 0.0003)],
)
def test_tensors_cut_once_need_no_common_multiple(group, dp_size, most):
    shapes = BLOCKS[group]
    layout = plan_compact(shapes, dp_size)
    assert layout.waste <= most
    with pytest.raises(ValueError):
        layout.validate_for_row_atomic()


@pytest.mark.parametrize("group", ["GPT-2", "Llama-2-7B", "Llama-3-8B", "Llama-3-70B", "Qwen2.5-7B"])
@pytest.mark.parametrize("dp_size", [8, 64, 512, 1024])
def test_tensors_of_language_models_start_on_128_bytes_at_no_cost(group, dp_size):
    layout = plan_compact(BLOCKS[group], dp_size, align=32)
    assert all(aligned(layout, 32))
    # The plain plan is found to a 1/4096 of the segment.
    assert layout.size <= plan_compact(BLOCKS[group], dp_size).size * (1 + 1 / 2048)


def test_a_tensor_starts_unaligned_only_where_room_is_missing():
    assert plan_compact([(5,), (64, 8)], 1, align=8).tensor_to_offset == (512, 0)
    exact = plan_compact([(5,), (3, 8), (3,)], 2, align=8)
    assert exact.waste == 0.0 and aligned(exact, 8) == [True, True, False]


def test_a_tensor_is_shifted_to_an_aligned_start_whose_rows_end_at_the_boundary():
    for boundary, room, block, align in product(range(1, 40), (0, 5, 17, 36), (1, 2, 3, 4, 6, 8), (1, 2, 4, 6, 8)):
        counts = [n for n in range(1, room // block + 1) if (boundary - n * block) % align == 0]
        assert _blocks_before(boundary, room, block, align) == max(counts, default=0)


def test_tensors_without_elements_take_no_place():
    layout = plan_compact([(0, 3), (4, 2), (0,)], 2, align=8)
    assert (layout.tensor_to_offset, layout.size) == ((0, 0, 0), 8)
    assert plan_compact([(0, 4)], 3).rank_to_offset == plan_compact([], 3).rank_to_offset == (0, 0, 0)


@pytest.mark.parametrize(
    "shapes, dp_size, options, message",
    [
        ([()], 0, {"align": 0}, "dp_size"),
        ([()], 2, {"block_sizes": [1, 2]}, "1 tensors need one block size or as many, but there are 2"),
        ([()], 2, {"block_sizes": [0]}, "block_size counts rows and must be positive, not 0"),
        ([()], 2, {"align": 0}, "tensor 0 is 0-D"),
        ([(3, 0)], 2, {}, "rows of 0 elements"),
        ([(3, 2)], 2, {"block_sizes": 2}, "not a multiple of block_size 2"),
        ([(4, 2)], 2, {"align": 0}, "align is a number of elements and must be positive, not 0"),
    ],
)
def test_bad_groups_are_refused_and_the_first_fault_is_named(shapes, dp_size, options, message):
    with pytest.raises(ValueError, match=message):
        plan_compact(shapes, dp_size, **options)


@pytest.mark.parametrize(
    "layout, blocks, message",
    [
        (GlobalLayout([(3, 2)], [0], 7, [0, 4]), 1, r"equal length, but they are \[4, 3\]"),
        (GlobalLayout([(2,), (3, 2)], [0, 2], 10, [0, 5]), 1, r"segment 1 starts at 5, .* cuts tensor 1 .* after 3"),
        (GlobalLayout([(6,)], [0], 6, [0, 2, 4]), 3, "segment 1 starts at 2"),
        (GlobalLayout([()], [0], 2, [0]), 1, "tensor 0 is 0-D"),
    ],
)
def test_the_validator_finds_cut_rows(layout, blocks, message):
    with pytest.raises(ValueError, match=message):
        validate_compact(layout, blocks)


def test_the_validator_accepts_offsets_that_are_no_multiple_of_the_row():
    validate_compact(GlobalLayout([(2, 3), (2, 3)], [1, 7], 14, [0, 7]))
    validate_compact(GlobalLayout([(0, 3), (2, 3)], [5, 1], 14, [0, 7]))


@pytest.mark.parametrize("dp_size", [2, 64, 512])
def test_five_hundred_tensors_are_planned_within_fifty_milliseconds(dp_size):
    random = Random(7)
    shapes = [tuple(random.randint(1, 64) for _ in range(random.randint(1, 3))) for _ in range(500)]

    def seconds():
        start = time.perf_counter()
        plan_compact(shapes, dp_size, align=32)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.05


@pytest.mark.parametrize(
    "group, dp_size, waste_bound, buckets, waste",
    [
        ("Llama-3-8B", 512, 0.02, 1, 0.0096),
        ("Llama-3-8B", 1024, 0.02, 2, 0.0193),
        ("Llama-2-7B", 512, 0.02, 2, 0.0104),
        ("Llama-2-7B", 1024, 0.02, 2, 0.0104),
        ("Llama-2-7B", 512, 0.01, 3, 0.0),
        ("Llama-3-70B", 512, 0.02, 2, 0.005),
        ("Llama-3-70B", 1024, 0.02, 2, 0.0099),
        ("Qwen2.5-7B", 512, 0.02, 2, 0.0079),
        ("GPT-2", 64, 0.02, 2, 0.0),
        ("GPT-2", 512, 0.02, 1, 0.1096),
        ("MLP", 8, 0.05, 1, 0.042),
        ("MLP", 64, 0.02, 3, 0.005),
        ("conv", 64, 0.02, 2, 0.0052),
    ],
)
def test_splitting_by_row_size_meets_the_bound_with_the_fewest_buckets(group, dp_size, waste_bound, buckets, waste):
    shapes = BLOCKS[group]
    split = split_by_row_family(shapes, dp_size, waste_bound=waste_bound)
    assert sorted(chain(*split)) == list(range(len(shapes)))
    assert all(ids == sorted(ids) for ids in split) and split == sorted(split)
    assert len(split) == buckets
    assert split_waste(shapes, dp_size, split) <= waste


def test_tensors_with_equal_blocks_share_a_bucket():
    shapes = BLOCKS["Llama-2-7B"]
    assert split_by_row_family(shapes, 512) == [[0, 1, 2, 3, 4, 5, 7, 8], [6]]
    # Blocks of two rows of 3 elements and of one row of 6 are one family.
    split = split_by_row_family([(40, 3), (20, 6), (10, 35)], 10, block_sizes=[2, 1, 1])
    assert split == [[0, 1], [2]]


def test_groups_without_elements_need_one_bucket():
    assert split_by_row_family([(0, 3), (0,)], 4) == [[0, 1]]


@pytest.mark.parametrize("count", [60, pytest.param(3_000, marks=pytest.mark.slow)])
def test_random_splits_partition_the_group_and_never_waste_more_than_one_bucket(count):
    for shapes, block_size in random_groups(count, seed=8):
        split = split_by_row_family(shapes, 8, block_sizes=block_size, waste_bound=0.0)
        assert sorted(chain(*split)) == list(range(len(shapes)))
        sizes = [plan_compact([shapes[i] for i in ids], 8, block_sizes=block_size).size for ids in split]
        assert sum(sizes) <= plan_compact(shapes, 8, block_sizes=block_size).size


def test_tight_groups_have_no_reason_for_waste():
    assert waste_reason(BLOCKS["Llama-2-7B"], 8) is None
    assert waste_reason([], 8) is None


@pytest.mark.parametrize(
    "shapes, dp_size, parts",
    [
        (
            BLOCKS["Llama-2-7B"],
            512,
            [
                "at 512 shards a fair share is 395,280 elements but a segment has 528,384 (33.7% waste)",
                "11,008 elements (tensor 6), 4,096 elements (tensor 0, tensor 1, tensor 2 and 3 more)",
                "a multiple of 176,128",
                "split the bucket by row size, or shard tensor 6 along another dim",
            ],
        ),
        (
            [(1, 197, 768)],
            8,
            ["segment has 151,296 (700.0% waste)", "use fewer shards, or shard tensor 0 along another dim"],
        ),
        (DOCUMENTED, 5, ["at 5 shards a fair share is 11 elements but a segment has 12", "the gaps before rows"]),
    ],
)
def test_the_reason_for_waste_names_the_rows_and_the_remedy(shapes, dp_size, parts):
    reason = waste_reason(shapes, dp_size)
    assert [part for part in parts if part not in reason] == []


def test_the_reason_for_waste_uses_the_names_it_is_given():
    names = ["q", "k", "v", "o", "gate", "up", "down", "norm1", "norm2"]
    assert "shard down along another dim" in waste_reason(BLOCKS["Llama-2-7B"], 512, names=names)


def test_bounds_and_names_that_make_no_sense_are_refused():
    for ask in (split_by_row_family, waste_reason):
        with pytest.raises(ValueError, match=r"waste_bound .* cannot be negative: -0.1"):
            ask([(4,)], 2, waste_bound=-0.1)
    with pytest.raises(ValueError, match="1 tensors need as many names, but there are 2"):
        waste_reason([(4,)], 2, names=["a", "b"])
