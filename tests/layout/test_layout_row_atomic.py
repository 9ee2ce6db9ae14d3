"""The documented row-atomic builder: exact offsets, errors in order, and what holds for every group."""

import math
import pickle

import pytest
from layout_groups import BLOCKS, DOCUMENTED, SHARDS, check_row_atomic, random_groups, segments

from fxshard.layout import GlobalLayout

build = GlobalLayout.build_for_row_atomic

# name: shapes, shards, block size, chunk, offsets, size, segment starts
EXAMPLES = {
    "documentation": (DOCUMENTED, 5, 1, 12, (0, 12, 32, 28, 48), 60, (0, 12, 24, 36, 48)),
    "documentation on four": (DOCUMENTED, 4, 1, 12, (0, 12, 32, 28, 48), 96, (0, 24, 48, 72)),
    "fragment in a gap, exactly a chunk is regular": ([(5, 4), (2, 6), (3,)], 2, 1, 12, (0, 24, 20), 48, (0, 24)),
    "row-aligned gap fill": ([(4, 4), (1, 6)], 2, 1, 12, (0, 18), 24, (0, 12)),
    "two linear layers": (
        [(16, 8), (16,), (4, 16), (4,)], 4, 1, 16, (0, 128, 144, 208), 256, (0, 64, 128, 192),
    ),
    "fragments descend, ties by id": ([(5, 8), (2,), (3,), (3,), (1,)], 2, 1, 8, (0, 46, 40, 43, 48), 64, (0, 32)),
    "surpluses of exactly a chunk": ([(7, 4), (5, 4), (6, 6), (3, 6)], 3, 1, 12, (0, 28, 48, 84), 108, (0, 36, 72)),
    "holes in the tail are not refilled": ([(2, 3), (1, 5), (3, 2)], 2, 1, 30, (0, 15, 6), 60, (0, 30)),
    "conjugate, three gaps, one refused conjugate": (
        [(5, 6), (7, 4), (3, 6), (5, 4), (2, 3), (1, 2), (4,)], 4, 1, 12,
        (0, 32, 60, 84, 78, 30, 104), 144, (0, 36, 72, 108),
    ),
    "blocks of 32 rows": ([(64, 4), (32, 6), (32,)], 2, 32, 384, (0, 384, 576), 768, (0, 384)),
    "prime rows": (BLOCKS["primes"], 8, 1, 10807, (11110, 0, 20907), 86456, tuple(range(0, 86456, 10807))),
    "one row a segment": ([(8, 4)], 8, 1, 4, (0,), 32, tuple(range(0, 32, 4))),
    "a late regular goes first": ([(3,), (3,), (3,), (2, 8)], 2, 1, 8, (16, 19, 22, 0), 32, (0, 16)),
    "GPT-2 block": (
        BLOCKS["GPT-2"], 8, 1, 3072,
        (0, 7080960, 1769472, 7083264, 2359296, 4718592, 4721664, 7084032, 7084800, 7085568, 7086336, 7087104),
        7102464, tuple(k * 887808 for k in range(8)),
    ),
    "more than two dims": ([(4, 3, 2, 2), (6, 4), (5,)], 2, 1, 12, (0, 48, 72), 96, (0, 48)),
    "blocks of one": ([(4, 3), (8, 2), (2, 3)], 2, 1, 6, (0, 12, 30), 36, (0, 18)),
    "blocks of two": ([(4, 3), (8, 2), (2, 3)], 2, 2, 12, (0, 12, 30), 48, (0, 24)),
    "a block of two fills a gap": ([(10, 2), (6, 2), (4, 3), (2,)], 2, 2, 12, (0, 24, 36, 20), 48, (0, 24)),
    "blocks of three": ([(6, 4), (6, 6), (3, 2)], 2, 3, 36, (36, 0, 60), 72, (0, 36)),
    "blocks of four": ([(12, 2), (8,)], 2, 4, 8, (0, 24), 32, (0, 16)),
    "blocks of eight": ([(32, 8)], 4, 8, 64, (0,), 256, (0, 64, 128, 192)),
    "nothing": ([], 3, 1, 1, (), 0, (0, 0, 0)),
    "seven scalars on four": ([(7,)], 4, 1, 1, (0,), 8, (0, 2, 4, 6)),
    "more shards than rows": ([(1,)], 3, 1, 1, (0,), 3, (0, 1, 2)),
    "one shard pads inside": ([(5, 4), (2, 6)], 1, 1, 12, (0, 24), 36, (0,)),
    "no rows at all": ([(0, 4)], 2, 1, 4, (0,), 0, (0, 0)),
    "an empty tensor is aligned": ([(0, 4), (3, 4), (2, 3)], 2, 1, 12, (20, 0, 12), 24, (0, 12)),
    "an empty tensor at the start of another": ([(3,), (2,), (0, 2)], 2, 1, 2, (0, 4, 4), 8, (0, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_offsets_sizes_and_segments_are_the_documented_ones(name):
    shapes, dp_size, block_size, chunk, offsets, size, starts = EXAMPLES[name]
    layout = build(shapes, dp_size, block_size=block_size)
    assert layout.tensor_to_offset == offsets
    assert (layout.size, layout.rank_to_offset) == (size, starts)
    assert layout.chunk_size(block_size=block_size) == chunk
    assert layout.tensor_shapes == tuple(shapes)


ROWS = {
    "documentation": [[2, 0, 0, 0, 0], [0, 3, 0, 0, 0], [0, 1, 1, 1, 0], [0, 0, 3, 0, 0], [0, 0, 0, 0, 1]],
    "fragment in a gap, exactly a chunk is regular": [[5, 0, 3], [0, 2, 0]],
    "row-aligned gap fill": [[3, 0], [1, 1]],
    "two linear layers": [[8, 0, 0, 0], [8, 0, 0, 0], [0, 16, 3, 0], [0, 0, 1, 4]],
    "fragments descend, ties by id": [[4, 0, 0, 0, 0], [1, 2, 3, 3, 1]],
    "surpluses of exactly a chunk": [[7, 2, 0, 0], [0, 3, 4, 0], [0, 0, 2, 3]],
    "holes in the tail are not refilled": [[2, 1, 3], [0, 0, 0]],
    "conjugate, three gaps, one refused conjugate": [
        [5, 1, 0, 0, 0, 1, 0], [0, 6, 2, 0, 0, 0, 0], [0, 0, 1, 5, 2, 0, 4], [0, 0, 0, 0, 0, 0, 0],
    ],
    "blocks of 32 rows": [[64, 0, 0], [0, 32, 32]],
    "prime rows": [[0, 101, 0], [97, 2, 13]] + [[0, 0, 0]] * 6,
    "one row a segment": [[1]] * 8,
    "a late regular goes first": [[0, 0, 0, 2], [3, 3, 3, 0]],
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_every_rank_owns_the_documented_rows(name):
    shapes, dp_size, block_size, *_ = EXAMPLES[name]
    layout = build(shapes, dp_size, block_size=block_size)
    parts = segments(layout)
    assert [[layout.get_row_range(i, part).numel for i in range(len(shapes))] for part in parts] == ROWS[name]


@pytest.mark.parametrize(
    "shapes, dp_size, block_size, message",
    [
        ([()], 0, 0, "dp_size .* must be positive, not 0"),
        ([()], -1, 1, "dp_size .* must be positive, not -1"),
        ([()], 2, 0, "block_size .* must be positive, not 0"),
        ([], 2, -4, "block_size .* must be positive, not -4"),
        ([(), (3, 0)], 2, 1, "tensor 0 is 0-D"),
        ([(3, 0), ()], 2, 2, r"tensor 0 of shape \(3, 0\) has rows of 0 elements"),
        ([(4,), (3,), ()], 2, 2, "tensor 1 .* 3 rows, which is not a multiple of block_size 2"),
        ([(48, 4)], 2, 32, "48 rows, which is not a multiple of block_size 32"),
    ],
)
def test_bad_groups_are_refused_and_the_first_fault_is_named(shapes, dp_size, block_size, message):
    with pytest.raises(ValueError, match=message):
        build(shapes, dp_size, block_size=block_size)


@pytest.mark.parametrize(
    "layout, block_size, message",
    [
        (GlobalLayout([()], [0], 3, [0, 2]), 0, "block_size .* must be positive"),
        (GlobalLayout([()], [0], 3, [0, 2]), 1, r"equal length, but they are \[2, 1\]"),
        (GlobalLayout([(), (2, 0)], [0, 1], 4, [0, 2]), 1, "tensor 0 is 0-D"),
        (GlobalLayout([(2, 0)], [0], 4, [0, 2]), 2, "rows of 0 elements"),
        (GlobalLayout([(3, 2)], [1], 8, [0, 4]), 2, "3 rows, which is not a multiple of block_size 2"),
        (GlobalLayout([(4, 2), (2, 2)], [0, 10], 20, [0, 10]), 2, "tensor 1 .* starts at 10, .* not a multiple of 4"),
        (GlobalLayout([(4, 2), (0, 4)], [0, 10], 20, [0, 10]), 1, "tensor 1 .* starts at 10"),
        (GlobalLayout([(4, 2), (1, 3)], [0, 9], 20, [0, 10]), 1, "segment 1 starts at 10, .* chunk size 6"),
    ],
)
def test_the_validator_names_the_first_broken_rule(layout, block_size, message):
    with pytest.raises(ValueError, match=message):
        layout.validate_for_row_atomic(block_size=block_size)


def test_the_validator_judges_offsets_that_no_builder_made():
    GlobalLayout([(2, 3), (4,)], [6, 12], 24, [0, 12]).validate_for_row_atomic()


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_groups_are_cut_between_blocks_within_the_size_bound_and_alike_for_all_shard_counts(count):
    for shapes, block_size in random_groups(count, seed=1):
        layouts = {dp_size: build(shapes, dp_size, block_size=block_size) for dp_size in SHARDS}
        assert len({layout.tensor_to_offset for layout in layouts.values()}) == 1
        for dp_size, layout in layouts.items():
            check_row_atomic(layout, shapes, dp_size, block_size)
            layout.validate_for_row_atomic(block_size=block_size)
            chunk = layout.chunk_size(block_size=block_size)
            assert layout.size % (chunk * dp_size) == 0
            assert not shapes or layout.size < layout.used + chunk * (len(shapes) + dp_size)
            assert layout == build(shapes, dp_size, block_size=block_size) == pickle.loads(pickle.dumps(layout))


@pytest.mark.parametrize(
    "group, block_size, chunk, percents",
    [
        ("Llama-3-8B", 1, 28_672, ("0.01", "0.12", "0.96")),
        ("Llama-3-8B", 32, 917_504, ("0.96", "7.69", "115")),
        ("Llama-2-7B", 1, 176_128, ("0.26", "0.26", "33.7")),
        ("Llama-2-7B", 32, 5_636_096, ("11.4", "78", "1326")),
        ("GPT-2", 1, 3_072, ("0.21", "2.63", "11.0")),
        ("GPT-2", 32, 98_304, ("11.0", "78", "610")),
        ("Qwen2.5-7B", 1, 132_608, ("0.14", "1.96", "16.5")),
        ("Qwen2.5-7B", 32, 4_243_456, ("1.96", "16.5", "832")),
        ("MLP", 1, 352_000, ("75", "602", "5514")),
        ("conv", 1, 903_168, ("204", "2329", "19330")),
        ("primes", 1, 10_807, ("315", "3220", "26462")),
    ],
)
def test_padding_of_known_groups_is_what_was_measured(group, block_size, chunk, percents):
    for dp_size, percent in zip((8, 64, 512), percents, strict=True):
        layout = build(BLOCKS[group], dp_size, block_size=block_size)
        assert layout.chunk_size(block_size=block_size) == chunk
        digits = len(percent.partition(".")[2])
        assert f"{100 * layout.waste:.{digits}f}" == percent
        assert math.isclose(layout.waste, layout.size / layout.used - 1)
