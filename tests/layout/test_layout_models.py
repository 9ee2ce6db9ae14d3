"""Shapes of well-known models, and the table that compares layouts on them."""

import math
from itertools import product

import pytest
from layout_groups import BLOCKS

from fxshard.layout_models import MODELS, waste_table


@pytest.mark.parametrize("model", ["GPT-2", "Llama-2-7B", "Llama-3-8B", "Llama-3-70B", "Qwen2.5-7B"])
def test_blocks_have_the_shapes_that_wastes_were_measured_on(model):
    assert sorted(MODELS[model]["block"].values()) == sorted(BLOCKS[model])


# blocks of each kind, and the published number of parameters (elements) of the whole model
@pytest.mark.parametrize(
    "model, repeats, parameters",
    [
        ("GPT-2", {"block": 12}, 124_439_808),
        ("Llama-2-7B", {"block": 32}, 6_738_415_616),
        ("Llama-3-8B", {"block": 32}, 8_030_261_248),
        ("Llama-3-70B", {"block": 80}, 70_553_706_496),
        ("Qwen2.5-7B", {"block": 28}, 7_615_616_512),
        ("ViT-B/16", {"block": 12}, 86_567_656),
        (
            "ResNet-50",
            {"layer1.1": 2, "layer2.1": 3, "layer3.1": 5, "layer4.1": 2},
            25_557_032,
        ),
        ("DeepSeek-V3", {"dense block": 3, "expert block": 58}, 671_026_419_200),
    ],
)
def test_units_add_up_to_the_published_number_of_parameters(model, repeats, parameters):
    total = sum(repeats.get(unit, 1) * math.prod(s) for unit, shapes in MODELS[model].items() for s in shapes.values())
    assert total == parameters


def test_the_table_has_a_row_for_each_unit_block_size_and_rank_count():
    units, block_sizes, ranks = ("block", "embedding", "head"), (1, 32), (8, 512)
    rows = waste_table(["Llama-2-7B"], ranks, block_sizes)
    assert [(row.unit, row.block_size, row.ranks) for row in rows] == list(product(units, block_sizes, ranks))
    block = rows[1]
    assert block.used == sum(map(math.prod, BLOCKS["Llama-2-7B"]))
    assert (f"{block.documented:.1%}", f"{block.compact:.1%}", f"{block.split:.1%}") == ("33.7%", "33.7%", "1.0%")
    assert block.buckets == 2 and block.note == ""


def test_no_plan_of_the_table_is_larger_than_the_documented_one():
    models = [model for model in MODELS if model != "DeepSeek-V3"]
    for row in waste_table(models):
        assert 0 <= row.split <= row.compact, row
        assert row.documented is None or row.compact <= row.documented, row
        assert (row.documented is None) == bool(row.note)
        assert (row.buckets > 1) == (row.split < row.compact), row


def test_tensors_that_blocks_do_not_divide_are_cut_by_row_and_named():
    row = waste_table(["GPT-2"], ranks=[8], block_sizes=[32])[1]
    assert row.unit == "embedding" and row.documented is None and row.compact < 0.02
    assert row.note == "refused: dim 0 is not a multiple of 32 in wte; cut by row"


def test_hundreds_of_experts_fit_tightly_in_one_bucket():
    rows = [row for row in waste_table(["DeepSeek-V3"], (64, 512), (1, 32)) if row.unit == "expert block"]
    assert all(row.compact <= 0.004 and row.buckets == 1 for row in rows)
    assert [row.documented > 0.1 for row in rows] == [False, False, True, True]


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown model 'BERT': choose from GPT-2, Llama-2-7B"):
        waste_table(["BERT"])


def test_every_row_above_the_bound_says_why() -> None:
    rows = waste_table(["GPT-2", "ViT-B/16"], ranks=(8, 512), block_sizes=(1, 128))
    assert any(row.reason for row in rows)
    for row in rows:
        assert bool(row.reason) == (row.split > 0.02), row
