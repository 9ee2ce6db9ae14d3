"""A sharded model trains to the numbers of one process: losses, gradients, parameters and optimizer state."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from training import Trained, train_plainly, train_sharded

FORMS = ("eager", "fx", "fx-unfused", "aot_eager", "inductor", "fx-inductor")


@functools.cache
def plain(name: str, bf16: int = 0) -> Trained:
    return train_plainly(name, bf16)


def answer(results: list[Any]) -> Trained:
    """Rank 0's, after every other rank has the same full values."""
    for other in results[1:]:
        results[0].compare(other, tolerance=0)
    return results[0]


def some(default: Sequence[str], of: Sequence[str]) -> list[Any]:
    """Parameters of which some are tried by default and the others with the slow tests."""
    return [name if name in default else pytest.param(name, marks=pytest.mark.slow) for name in of]


@pytest.mark.parametrize("form", some(("eager", "fx", "fx-inductor"), FORMS))
def test_two_ranks_equal_one_process(ranks2: Any, form: str) -> None:
    plain("gpt2").compare(answer(ranks2.run(train_sharded, "gpt2", form)))


@pytest.mark.parametrize("form", some(("eager", "fx"), FORMS))
def test_four_ranks_equal_one_process(ranks4: Any, form: str) -> None:
    plain("llama").compare(answer(ranks4.run(train_sharded, "llama", form)))


@pytest.mark.parametrize("form", some(("fx",), ("eager", "fx")))
@pytest.mark.parametrize("name", ("conv", "tied"))
def test_convolutions_and_tied_weights_equal_one_process(ranks2: Any, name: str, form: str) -> None:
    plain(name).compare(answer(ranks2.run(train_sharded, name, form)))


@pytest.mark.parametrize("form", some(("fx",), ("eager", "fx")))
def test_kept_parameters_give_the_same_numbers_as_regathered_ones(ranks2: Any, form: str) -> None:
    again = answer(ranks2.run(train_sharded, "gpt2", form, True))
    kept = answer(ranks2.run(train_sharded, "gpt2", form, False))
    again.compare(kept, tolerance=0)


@pytest.mark.parametrize("form", ("eager", "fx"))
def test_hybrid_sharding_equals_one_process(ranks4: Any, form: str) -> None:
    plain("gpt2").compare(answer(ranks4.run(train_sharded, "gpt2", form, True, False, (2, 2))))


@pytest.mark.parametrize("form", some(("fx", "fx-inductor"), ("eager", "fx", "fx-inductor")))
def test_bf16_gathers_with_fp32_reduction_equal_the_casts_done_by_hand(ranks2: Any, form: str) -> None:
    plain("gpt2", 2).compare(answer(ranks2.run(train_sharded, "gpt2", form, True, True)), tolerance=3e-2)


@pytest.mark.parametrize("name", some(("gpt2",), ("conv", "gpt2", "llama", "tied")))
def test_the_fused_graph_computes_what_the_unfused_one_does(ranks2: Any, name: str) -> None:
    unfused = answer(ranks2.run(train_sharded, name, "fx-unfused"))
    unfused.compare(answer(ranks2.run(train_sharded, name, "fx")), tolerance=1e-6)
