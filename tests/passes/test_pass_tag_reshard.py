"""tag_reshard: which full parameters are gathered again for backward, and which are kept."""

from __future__ import annotations

from typing import Any

import pytest
from pass_graphs import Sketch, param, sharded, text
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxshard.passes import tag_reshard

RECOMPUTE, SAVE = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE


def tags(gm: fx.GraphModule) -> dict[str, Any]:
    """Every call's tag, or None, by the name that `text` gives it."""
    assert tag_reshard.run(gm).modified
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    return {line: n.meta.get("recompute") for line, n in zip(text(gm), nodes, strict=True)}


def weights(**options: Any) -> Sketch:
    return Sketch(sharded(**options, a=[param(4, 4), param(4)]), x=(4, 4))


def test_a_resharding_units_gathers_and_other_forms_of_them_are_recomputed(two_ranks: None) -> None:
    g = weights()
    weight = g.gather("a", 0)
    gm = g.output(g.clone(g.permute(weight, [1, 0])), g.select(g.unsqueeze(weight, 0), 0, 0))
    expected = dict.fromkeys(["gather a 0", "permute", "clone", "unsqueeze", "select"], RECOMPUTE)
    assert tags(gm) == expected


def test_whatever_views_a_parameter_is_recomputed(two_ranks: None) -> None:
    g = weights()
    weight = g.gather("a", 0)
    gm = g.output(g.diagonal(weight), g.unfold(weight, 0, 2, 1), g.as_strided(weight, [2], [1]))
    assert tags(gm) == dict.fromkeys(["gather a 0", "diagonal", "unfold", "as_strided"], RECOMPUTE)


def test_nodes_that_mix_a_parameter_with_other_data_are_left_alone(two_ranks: None) -> None:
    g = weights()
    out = g.mm(g.x, g.gather("a", 0))
    gm = g.output(g.permute(g.add(out, g.gather("a", 1)), [1, 0]))
    assert tags(gm) == {"gather a 0": RECOMPUTE, "mm": None, "gather a 1": RECOMPUTE, "add": None, "permute": None}


def test_forms_of_other_data_are_left_alone(two_ranks: None) -> None:
    g = weights()
    gm = g.output(g.mm(g.permute(g.x, [1, 0]), g.gather("a", 0)))
    assert tags(gm) == {"permute": None, "gather a 0": RECOMPUTE, "mm": None}


def test_a_unit_that_keeps_its_parameters_saves_them_and_not_each_form(two_ranks: None) -> None:
    g = weights(reshard=False)
    gm = g.output(g.mm(g.x, g.permute(g.gather("a", 0), [1, 0])))
    assert tags(gm) == {"gather a 0": SAVE, "permute": None, "mm": None}


def test_on_one_rank_there_is_nothing_to_gather_again() -> None:
    g = weights()
    gm = g.output(g.mm(g.x, g.gather("a", 0)))
    assert tags(gm) == {"gather a 0": SAVE, "mm": None}


@pytest.mark.parametrize("reshard", [True, False])
def test_gathers_belong_to_a_region_behind_every_checkpointed_one(two_ranks: None, reshard: bool) -> None:
    g = weights(reshard=reshard)
    gm = g.output(g.mm(g.x, g.gather("a", 0)))
    tag_reshard.run(gm)
    assert {n.meta["ac_graph_id"] for n in gm.graph.nodes if "recompute" in n.meta} == {1 << 40}


def test_a_graph_without_parameters_is_left_alone() -> None:
    g = Sketch({}, x=(4, 4))
    gm = g.output(g.relu(g.x))
    assert not tag_reshard.run(gm).modified
    assert not any("recompute" in n.meta for n in gm.graph.nodes)
