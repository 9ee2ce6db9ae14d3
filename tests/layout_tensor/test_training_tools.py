"""Gradient clipping, gradient scaling, initialisation and other tools around a training step, on sharded parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_cases import cuts_of, mesh_of, shard, values
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from fxshard.layout_tensor import LayoutTensor


def _sharded(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(t) for t in shard(values(dtype=dtype), cuts_of(mesh_of(*sizes)))]


def _with_grads(
    sizes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Plain and sharded parameters with the same values and gradients; the last one has none."""
    plain, sharded = [nn.Parameter(v) for v in values(dtype=dtype)], _sharded(sizes, dtype)
    grads = values(1, dtype)
    for params, of_all in ((plain, grads), (sharded, shard(grads, [p.cut for p in sharded]))):
        for p, g in zip(params[:-1], of_all, strict=False):
            p.grad = g
    return plain, sharded


def _same_grads(plain: list[nn.Parameter], sharded: list[nn.Parameter]) -> None:
    for p, s in zip(plain[:-1], sharded, strict=False):
        torch.testing.assert_close(s.grad.full_tensor(), p.grad)


# ---- clipping -------------------------------------------------------------------------------------------------------


def _clips_like_plain(sizes: tuple[int, ...]) -> None:
    for foreach in (None, False, True):
        for order in (2.0, 1.0, math.inf, -math.inf, 0.0, 3.0):
            plain, sharded = _with_grads(sizes)
            expected = clip_grad_norm_(plain, 0.5, norm_type=order, foreach=foreach)
            norm = clip_grad_norm_(sharded, 0.5, norm_type=order, foreach=foreach)
            torch.testing.assert_close(norm, expected)
            _same_grads(plain, sharded)
        plain, sharded = _with_grads(sizes)
        clip_grad_value_(plain, 0.3, foreach=foreach)
        clip_grad_value_(sharded, 0.3, foreach=foreach)
        _same_grads(plain, sharded)
        assert type(get_total_norm([p.grad for p in sharded[:-1]], foreach=foreach)) is Tensor
        sharded[0].grad.to_local().fill_(math.nan)
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(sharded, 1.0, error_if_nonfinite=True, foreach=foreach)


@pytest.mark.parametrize("sizes", [(2,), (2, 1)])
def test_gradients_are_clipped_by_the_norm_of_all_shards(ranks2, sizes):
    ranks2.run(_clips_like_plain, sizes)


def test_gradients_are_clipped_without_a_process_group():
    _clips_like_plain(())


def _norms_on_every_rank() -> list[float]:
    _, sharded = _with_grads((2,), torch.bfloat16)
    return [clip_grad_norm_(sharded, 0.5, foreach=foreach).item() for foreach in (True, False)]


def test_every_rank_gets_the_same_norm(ranks2):
    first, second = ranks2.run(_norms_on_every_rank)
    assert first == second


# ---- gradient scaling -----------------------------------------------------------------------------------------------


def _an_overflow_on_one_rank_skips_the_step_on_all(fused: bool) -> list[Any]:
    seen = []
    for overflow in (False, True):
        _, params = _with_grads((2,))
        optimizer = torch.optim.AdamW(params, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        scaler.scale(torch.ones(()))
        before = [p.full_tensor().detach() for p in params]
        if overflow and dist.get_rank() == 1:
            params[0].grad.to_local()[-1] = math.inf
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(p.full_tensor(), b) for p, b in zip(params, before, strict=True)]
        seen.append((moved, scaler.get_scale()))
    return seen


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_and_lowers_the_scale_on_all(ranks2, fused):
    expected = [([True] * 4 + [False], 8.0), ([False] * 5, 2.0)]
    assert ranks2.run(_an_overflow_on_one_rank_skips_the_step_on_all, fused) == [expected] * 2


def _unscaled_gradients_are_those_of_plain_parameters() -> None:
    plain, sharded = _with_grads((2,))
    for params in (plain, sharded):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        optimizer = torch.optim.SGD(params)
        scaler.unscale_(optimizer)
        clip_grad_norm_(params, 1.0)
    _same_grads(plain, sharded)


def test_gradients_are_unscaled_before_they_are_clipped(ranks2):
    ranks2.run(_unscaled_gradients_are_those_of_plain_parameters)


# ---- initialisation -------------------------------------------------------------------------------------------------

INITS: dict[str, Callable[[Tensor], Any]] = {
    "normal": lambda t: nn.init.normal_(t, 1.0, 0.02),
    "uniform": lambda t: nn.init.uniform_(t, -2, 3),
    "trunc normal": lambda t: nn.init.trunc_normal_(t, std=0.5, a=-1, b=1),
    "constant": lambda t: nn.init.constant_(t, 3.5),
    "ones": lambda t: nn.init.ones_(t),
    "zeros": lambda t: nn.init.zeros_(t),
    "exponential": lambda t: t.exponential_(2.0),
    "log normal": lambda t: t.log_normal_(),
    "cauchy": lambda t: t.cauchy_(),
    "geometric": lambda t: t.geometric_(0.3),
    "random": lambda t: t.random_(2, 9),
    "bernoulli": lambda t: t.bernoulli_(0.4),
    "rand_like": lambda t: t.copy_(torch.rand_like(t)),
    "randn_like": lambda t: t.copy_(torch.randn_like(t, dtype=torch.float64)),
    "randint_like": lambda t: t.copy_(torch.randint_like(t, 5)),
    "dropout": lambda t: t.copy_(nn.functional.dropout(t, 0.5)),
}
MATRIX_INITS: dict[str, Callable[[Tensor], Any]] = {
    "xavier uniform": nn.init.xavier_uniform_,
    "xavier normal": nn.init.xavier_normal_,
    "kaiming uniform": lambda t: nn.init.kaiming_uniform_(t, a=math.sqrt(5)),
    "kaiming normal": lambda t: nn.init.kaiming_normal_(t, mode="fan_out"),
}


@torch.no_grad()
def _draws_like_plain(sizes: tuple[int, ...]) -> None:
    for name, init in {**INITS, **MATRIX_INITS}.items():
        plain, sharded = values(), _sharded(sizes)
        for p, s in zip(plain, sharded, strict=True):
            if name in MATRIX_INITS and p.dim() < 2:
                continue
            torch.manual_seed(3)
            init(p)
            after = torch.get_rng_state()
            torch.manual_seed(3)
            init(s)
            assert torch.equal(s.full_tensor(), p), name
            assert torch.equal(torch.get_rng_state(), after), name
    generator, twin = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    nn.init.normal_(sharded[0], generator=generator)
    nn.init.normal_(plain[0], generator=twin)
    assert torch.equal(sharded[0].full_tensor(), plain[0]) and torch.equal(generator.get_state(), twin.get_state())


@pytest.mark.parametrize("sizes", [(2,), (2, 1)])
def test_random_values_are_those_of_the_unsharded_tensor(ranks2, sizes):
    ranks2.run(_draws_like_plain, sizes)


@torch.no_grad()
def _ranks_with_other_seeds_draw_one_tensor(sizes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    own = torch.get_rng_state()
    (param, *_), drawn = _sharded(sizes), []
    for _ in range(2):
        nn.init.normal_(param)
        drawn.append(param.full_tensor())
    assert torch.equal(torch.get_rng_state(), own) is (dist.get_rank() > 0)
    return drawn


@pytest.mark.parametrize("sizes", [(2,), (2, 1)])
def test_ranks_seeded_differently_draw_the_first_ranks_values_and_keep_their_state(ranks2, sizes):
    torch.manual_seed(0)
    expected = [torch.randn(7, 3), torch.randn(7, 3)]
    for drawn in ranks2.run(_ranks_with_other_seeds_draw_one_tensor, sizes):
        assert all(map(torch.equal, drawn, expected))


@pytest.mark.parametrize(
    "init",
    [nn.init.orthogonal_, nn.init.eye_, nn.init.dirac_, lambda t: nn.init.sparse_(t, 0.5)],
    ids=["orthogonal", "eye", "dirac", "sparse"],
)
def test_an_initialisation_of_the_whole_matrix_is_refused(init):
    shape = (4, 4, 3) if init is nn.init.dirac_ else (4, 4)
    (tensor,) = shard([torch.ones(shape)], cuts_of(mesh_of(), [[(shape, 0)]]))
    with pytest.raises(NotImplementedError, match="full_tensor"):
        init(tensor)


# ---- the rest of a training loop ------------------------------------------------------------------------------------


def test_a_full_state_dict_loads_into_sharded_parameters_and_keeps_their_memory():
    module, full = nn.Linear(3, 7), nn.Linear(3, 7)
    cuts = cuts_of(mesh_of(), [(((7, 3), 0), ((7,), 0))])
    for name, tensor in zip(("weight", "bias"), shard([p.data for p in module.parameters()], cuts), strict=True):
        setattr(module, name, nn.Parameter(tensor))
    at = module.weight.to_local().data_ptr()
    module.load_state_dict(full.state_dict())
    assert torch.equal(module.weight.full_tensor(), full.weight) and module.weight.to_local().data_ptr() == at
    twin = copy.deepcopy(module)
    module.load_state_dict(twin.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict(nn.Linear(3, 6).state_dict())


def test_moving_averages_swap_in_place_inside_inference_mode():
    (param, *_), (average, *_) = _sharded(()), shard(values(4), cuts_of(mesh_of()))
    with torch.inference_mode():
        twin = param.detach().clone()
        twin.lerp_(average, 0.5)
    assert torch.equal(twin.full_tensor(), values()[0].lerp(values(4)[0], 0.5))


def test_swa_averages_of_sharded_parameters_are_those_of_plain_ones():
    from torch.optim.swa_utils import get_ema_multi_avg_fn

    plain, sharded = values(), _sharded(())
    update = get_ema_multi_avg_fn(0.9)
    update(plain, values(1), 3)
    update(sharded, shard(values(1), [p.cut for p in sharded]), 3)
    for p, s in zip(plain, sharded, strict=True):
        assert torch.equal(s.full_tensor(), p)


@pytest.mark.parametrize(
    "kind, options", [(torch.optim.LBFGS, {}), (torch.optim.Muon, {}), (torch.optim.Adafactor, {})]
)
def test_optimizers_of_whole_matrices_are_refused_by_name(kind, options):
    params = [nn.Parameter(t) for t in shard([torch.ones(7, 3)], cuts_of(mesh_of(), [[((7, 3), 0)]]))]
    for p in params:
        p.grad = LayoutTensor.from_local_slab(torch.ones(7, 3), p.cut)
    optimizer = kind(params, **options)
    with pytest.raises(NotImplementedError, match="full_tensor"):
        optimizer.step(lambda: torch.zeros(())) if kind is torch.optim.LBFGS else optimizer.step()
