"""What multiplies and divides gradients: sums and means, divide factors, scaling factors, half precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from micro_steps import Net, Trained, answer, mesh_of, set_flags, train
from ranks import RankPool
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from training import compiled, full

import fxshard
from fxshard import capture
from fxshard.codegen import generate
from fxshard.passes.rewrite import MARK
from fxshard.reduction import Reduction, plan_reduction
from fxshard.unit import units_of

Plain = Callable[[Sequence[Sequence[str]]], Trained]
FORMS = ("eager", "fx")
STEP = [["sync"]]


def factors(model: Any, op: str | None, divide: float | None, scale: Any) -> None:
    if op is not None:
        model.set_reduce_op_type(op)
    for unit in units_of(model):
        if divide is not None:
            unit.modules[0].set_gradient_divide_factor(divide)
        if scale is not None:
            unit.modules[0].set_gradient_scaling_factor(scale)


ASKED: dict[str, tuple[str | None, float | None, Any, float]] = {
    "sum": (" SUM ", None, None, 4.0),
    "mean": ("avg", None, None, 1.0),
    "divisor": (None, 2.0, None, 2.0),
    "sum and divisor": ("sum", 8, None, 0.5),
    "factor": (None, None, 2.0, 2.0),
    "whole factor": (None, None, 3, 3.0),
    "tensor": (None, None, torch.tensor([0.5]), 0.5),
}
BY_DEFAULT = {("eager", "sum"), ("fx", "sum and divisor"), ("fx", "tensor")}


@pytest.mark.parametrize(
    ("form", "asked"),
    [
        pytest.param(form, asked, marks=() if (form, asked) in BY_DEFAULT else pytest.mark.slow)
        for form in FORMS
        for asked in ASKED
    ],
)
def test_gradients_are_the_mean_times_what_was_asked_for(
    ranks4: RankPool, plain: Plain, form: str, asked: str
) -> None:
    op, divide, scale, times = ASKED[asked]
    prepare = partial(factors, op=op, divide=divide, scale=scale)
    got = answer(ranks4.run(_train_prepared, form, (2, 2), STEP, prepare)).grads[0]
    for name, grad in plain(STEP).grads[0].items():
        assert grad is not None
        torch.testing.assert_close(got[name], grad * times, rtol=1e-5, atol=1e-6)


def _train_prepared(form: str, shape: Sequence[int], script: Any, prepare: Any) -> Trained:
    return train(form, shape, script, prepare=prepare)


def scaled_replicas(form: str) -> tuple[list[float], list[float]]:
    """A replicated parameter is scaled as well."""
    layer: Any = nn.Linear(2, 2)
    fxshard.fully_shard(layer, mesh=mesh_of((2,)), replicate_params={layer.bias})
    layer.set_gradient_scaling_factor(4.0)
    compiled(layer, form)(torch.ones(3, 2)).sum().backward()
    return full(layer.weight.grad).flatten().tolist(), full(layer.bias.grad).tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("form", FORMS)
def test_replicated_parameters_are_scaled_too(ranks2: RankPool, form: str) -> None:
    assert ranks2.run(scaled_replicas, form) == [([12.0] * 4, [12.0] * 2)] * 2


def scale_over_steps(form: str, flags: Sequence[str]) -> list[list[float]]:
    """Gradient 1 in each micro-batch; three micro-batches a cycle, two cycles with another factor each."""
    layer: Any = nn.Linear(1, 2, bias=False)
    fxshard.fully_shard(layer, mesh=mesh_of((2, 2)))
    step, seen = compiled(layer, form), []
    for cycle, factor in enumerate((2.0, 5.0)):
        for flag in flags:
            layer.set_gradient_scaling_factor(factor)
            set_flags(layer, flag)
            with torch._dynamo.config.patch(error_on_recompile=cycle == 1):
                step(torch.ones(1, 1)).sum().backward()
        seen.append(full(layer.weight.grad).flatten().tolist())  # type: ignore[union-attr]
        layer.zero_grad()
    return seen


FLAGS = [["sync"] * 3, ["wait", "wait", "sync"], ["park", "park", "sync"]]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: f[0])
@pytest.mark.parametrize("form", (pytest.param("eager", marks=pytest.mark.slow), "fx"))
def test_a_factor_acts_once_and_a_new_value_recompiles_nothing(
    ranks4: RankPool, form: str, flags: Sequence[str]
) -> None:
    for seen in ranks4.run(scale_over_steps, form, flags):
        assert seen == [[6.0, 6.0], [15.0, 15.0]]


def test_a_graph_multiplies_once_a_bucket(fake_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled: list[int] = []

    def counting(gm: Any, *rest: Any) -> Any:
        marked = [n for n in gm.graph.nodes if MARK in n.meta]
        scaled.append(sum(n.target is torch.ops.aten.mul.Tensor for n in marked))
        return generate(gm, *rest)

    monkeypatch.setattr(capture, "generate", counting)
    with fake_world(4):
        model: Any = fxshard.shard(Net(), mesh_of((4,)))
        factors(model, None, None, 2.0)
        compiled(model, "fx")(torch.ones(2, 5)).sum().backward()
    assert scaled == [0, 3]


def changed_divisor(form: str) -> list[float]:
    layer: Any = nn.Linear(1, 1, bias=False)
    fxshard.fully_shard(layer)
    step, seen = compiled(layer, form), []
    for factor in (2.0, 4.0, 2.0):
        layer.set_gradient_divide_factor(factor)
        step(torch.ones(1, 1)).sum().backward()
        seen.append(full(layer.weight.grad).item())  # type: ignore[union-attr]
        layer.zero_grad()
    return seen


@pytest.mark.parametrize("form", FORMS)
def test_a_changed_divisor_holds_from_the_next_step_on(ranks2: RankPool, form: str) -> None:
    assert ranks2.run(changed_divisor, form) == [[1.0, 0.5, 1.0]] * 2


# -- halves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "replicas", "rule"),
    [
        (8, 1, Reduction("sum", 2.0, 4.0, 1.0)),
        (4, 4, Reduction("sum", 4.0, 1.0, 4.0)),
        (3, 1, Reduction("sum", 1.0, 3.0, 1.0)),
        (1, 1, Reduction("sum", 1.0, 1.0, 1.0)),
    ],
)
def test_fp16_divides_before_and_after_the_sum(shards: int, replicas: int, rule: Reduction) -> None:
    assert plan_reduction(shards, replicas, torch.float16) == rule


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_divide_behind_each_stage(dtype: torch.dtype) -> None:
    assert plan_reduction(4, 2, dtype) == Reduction("sum", 1.0, 4.0, 2.0)


def test_a_native_mean_divides_nothing() -> None:
    assert plan_reduction(4, 2, torch.float32, "native avg") == Reduction("avg")


def halves(form: str) -> list[float]:
    """Four ranks with gradients whose sum is too large for fp16, and whose mean is not."""
    layer: Any = nn.Linear(1, 4, bias=False)
    fxshard.fully_shard(layer, mesh=mesh_of((4,)), mp_policy=MixedPrecisionPolicy(torch.float32, torch.float16))
    compiled(layer, form)(torch.full((1, 1), 30000.0)).sum().backward()
    return full(layer.weight.grad).flatten().tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("form", FORMS)
def test_a_mean_that_fits_into_fp16_does_not_overflow(ranks4: RankPool, form: str) -> None:
    for grads in ranks4.run(halves, form):
        assert grads == [pytest.approx(30000.0, rel=1e-3)] * 4


# -- refusals ----------------------------------------------------------------------------------------------------------


def native_average() -> str:
    layer: Any = nn.Linear(2, 2)
    fxshard.fully_shard(layer)
    try:
        layer.set_reduce_op_type("native avg")
    except ValueError as e:
        return str(e)
    return f"accepted on {dist.get_backend()}"


def test_gloo_has_no_native_mean(ranks2: RankPool) -> None:
    for said in ranks2.run(native_average):
        assert "needs a backend that averages" in said and '"avg"' in said


@pytest.mark.parametrize("value", [True, "2", [2.0], torch.ones(2)], ids=str)
def test_a_scaling_factor_is_one_number(value: Any) -> None:
    layer: Any = fxshard.fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="a gradient scaling factor is None, a number or a tensor of one element"):
        layer.set_gradient_scaling_factor(value)


@pytest.mark.parametrize("value", [0, -1.0, True, "2"], ids=str)
def test_a_divisor_is_a_number_above_zero(value: Any) -> None:
    layer: Any = fxshard.fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="a number above 0"):
        layer.set_gradient_divide_factor(value)


def test_an_unknown_reduction_is_refused() -> None:
    layer: Any = fxshard.fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="one of 'avg', 'sum', 'native avg'; got 'max'"):
        layer.set_reduce_op_type("max")


@pytest.mark.parametrize(
    "method",
    [
        "set_requires_gradient_sync",
        "set_requires_all_reduce",
        "set_reshard_after_forward",
        "set_reshard_after_backward",
        "set_is_last_backward",
        "reset_iter_state",
        "unshard",
    ],
)
def test_flags_are_bools(method: str) -> None:
    layer = fxshard.fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="should be a bool, got int"):
        getattr(layer, method)(1)
