"""Random models train sharded as in one process; and what the comparison sees.

``pytest -m slow tests/fuzz`` runs more of them, in every form; ``python tests/fuzz/fuzz.py`` runs as many as asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from fuzz_compare import TOLERANCES, difference, largest, largest_gradients
from fuzz_reduce import reduced
from fuzz_runner import FORMS, Runner, report
from fuzz_spec import Block, Layer, Spec, Training, random_spec
from fuzz_training import Plain, Result, train


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[dict[str, Runner]]:
    runners = {form: Runner(2, form) for form in FORMS}
    yield runners
    for runner in runners.values():
        runner.close()


def check(runner: Runner, spec: Spec) -> None:
    fault = runner.fault(spec)
    assert not fault, report(spec, runner, fault)


@pytest.mark.parametrize("seed", [3, 24, 38])
def test_random_models_train_eagerly_as_in_one_process(two_ranks: dict[str, Runner], seed: int) -> None:
    check(two_ranks["eager"], random_spec(seed))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("form, models", [("eager", 100), ("fx", 40), ("inductor", 4)])
def test_many_random_models_train_as_in_one_process(form: str, models: int, ranks: int) -> None:
    runner = Runner(ranks, form)
    faults = {}
    for seed in range(models):
        if fault := runner.fault(random_spec(seed)):
            faults[seed] = report(random_spec(seed), runner, fault)
    runner.close()
    assert not faults, "\n".join(faults.values())


# -- the fuzzer itself -----------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_model_and_training_every_time() -> None:
    assert random_spec(5) == random_spec(5) != random_spec(6)
    first, again = (train(random_spec(5), Plain(random_spec(5))) for _ in range(2))
    assert difference(first, again, 0.0) == ""


def plain_results(seeds: range) -> Iterator[tuple[Spec, Result]]:
    """Of models in fp64 throughout."""
    for seed in seeds:
        spec = random_spec(seed)
        spec = replace(spec, dtype="float64", root=_of_one_dtype(spec.root))
        yield spec, train(spec, Plain(spec))


def _of_one_dtype(block: Block) -> Block:
    children = [replace(c, dtype="") if isinstance(c, Layer) else _of_one_dtype(c) for c in block.children]
    return replace(block, children=tuple(children))


def test_every_gradient_twice_as_large_is_a_difference_unless_it_is_truly_zero() -> None:
    zeros = doubled = 0
    for spec, result in plain_results(range(20)):
        steps = largest_gradients(result)
        for name, value in result.items():
            if not name.startswith("gradient") or value is None or not value.numel():
                continue
            step = steps[name.partition(" of ")[0] + " of " + name.split(" of ")[1]]
            zero = largest(value) <= 1e-12 * step
            other = {**result, name: value * 2}
            assert (difference(result, other, TOLERANCES["float64"]) == "") == zero, f"{name} of\n{spec.describe()}"
            zeros, doubled = zeros + zero, doubled + (not zero)
    assert zeros > 10 and doubled > 300


@pytest.mark.parametrize(
    "other, said",
    [
        (None, "a: a value became None"),
        (torch.ones(2), "a: (3,) torch.float32 became (2,) torch.float32"),
        (torch.ones(3).double(), "became (3,) torch.float64"),
        (torch.tensor([1.0, 1.0, 1.1]), "a is off by 1.00e-01"),
        (torch.tensor([1.0, 1.0, torch.nan]), "a is off by nan"),
    ],
)
def test_every_kind_of_difference_is_said(other: torch.Tensor | None, said: str) -> None:
    assert said in difference({"a": torch.ones(3)}, {"a": other}, 1e-5)
    assert difference({"a": torch.ones(3)}, {"a": torch.ones(3) + 1e-6}, 1e-5) == ""


def test_a_failing_spec_is_reduced_to_what_fails() -> None:
    spec = random_spec(8)
    assert len(spec.layers) > 1 and spec.training != Training()
    small = reduced(spec, lambda s: any(layer.kind == spec.layers[-1].kind for layer in s.layers))
    assert [layer.kind for layer in small.layers] == [spec.layers[-1].kind]
    assert small.training == Training(steps=1) and small.units == "root"


def test_ranks_that_do_not_answer_are_a_fault_with_the_seed_the_model_and_a_command() -> None:
    runner = Runner(2, "fx", seconds=0.01)
    text = report(random_spec(7), runner, runner.fault(random_spec(7)))
    runner.close()
    assert text.startswith("seed 7: ") and all(layer.kind in text for layer in random_spec(7).layers)
    assert "no answer within 0.0 s" in text
    assert text.endswith("again: python tests/fuzz/fuzz.py --seed 7 --ranks 2 --form fx")
