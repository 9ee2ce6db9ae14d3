"""``reshard_after_forward`` as a number of ranks: they share what forward gathered, and backward gathers from them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from micro_steps import Net, Trained, answer, collectives, mesh_of, train
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from training import compiled, full

import fxshard
from fxshard.unit import units_of

Plain = Callable[[Sequence[Sequence[str]]], Trained]
FORMS = ("eager", "fx", pytest.param("fx-inductor", marks=pytest.mark.slow))
STEPS = [["sync"], ["wait", "sync"], ["sync"]]
IN_PAIRS = {"reshard_after_forward": 2}


def train_in_pairs(form: str) -> Trained:
    return train(form, (4,), STEPS, shard=IN_PAIRS, log=True)


@pytest.mark.parametrize("form", FORMS)
def test_it_equals_one_process_and_backward_gathers_from_two_ranks(
    ranks4: RankPool, plain: Plain, fake_world: Any, form: str
) -> None:
    got = answer(ranks4.run(train_in_pairs, form))
    plain(STEPS).compare(got)
    with fake_world(4):
        sizes = [b.layout.size for u in units_of(fxshard.shard(Net(), mesh_of((4,)))) for b in u.buckets]
    sent = Counter(elements for op, elements in got.logs[-1] if op == "all_gather")
    assert sent == Counter([size // 4 for size in sizes] + [size // 2 for size in sizes])


def held() -> int:
    """Bytes of all storages that this process can reach."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def kept_by_forward(form: str, ranks: int) -> tuple[int, int]:
    """Bytes that are kept after a forward because there will be a backward, and those of the gathered buffers."""
    model = fxshard.shard(
        nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)]),
        mesh_of((4,)),
        units="auto",
        reshard_after_forward=ranks,
    )
    forward = compiled(model, form)
    x = torch.ones(1, 64, requires_grad=True)
    forward(x).sum().backward()
    before = held()
    loss = forward(x).sum()
    kept = held() - before
    loss.backward()
    return kept, sum(b.layout.size for u in units_of(model) for b in u.buckets) * 4


@pytest.mark.parametrize("form", ("eager", "fx"))
def test_between_forward_and_backward_a_rank_keeps_its_part(ranks4: RankPool, form: str) -> None:
    for ranks, share in ((4, 0.0), (2, 0.5), (1, 1.0)):
        for kept, gathered in ranks4.run(kept_by_forward, form, ranks):
            assert gathered * share <= kept < gathered * (share + 0.2), (ranks, kept / gathered)


class Routed(nn.Module):
    """Rank 0 takes the first expert, the others the second; the head's value is not needed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(5, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[min(dist.get_rank(), 1)](torch.tanh(self.start(x)))


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def gradients(
    make: Callable[[], nn.Module], form: str, shard: dict[str, Any], prepare: Callable[[Any], None] | None = None
) -> tuple[dict[str, Tensor | None], list[int]]:
    """After two forwards and their backwards, the second first; and how many elements each all-gather sent."""
    torch.manual_seed(0)
    model = fxshard.shard(make(), mesh_of((4,)), **shard)
    if prepare is not None:
        prepare(model)
    forward = compiled(model, form)
    with collectives() as log:
        losses = []
        for number in range(2):
            torch.manual_seed(10 * number + dist.get_rank())
            losses.append(forward(torch.randn(3, 5).requires_grad_()).square().mean())
        for loss in reversed(losses):
            loss.backward()
    return {k: full(p.grad) for k, p in model.named_parameters()}, [n for op, n in log if op == "all_gather"]


def prefetch(model: Any) -> None:
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])


@pytest.mark.parametrize(
    ("make", "form", "prepare"),
    [
        (Routed, "eager", None),
        pytest.param(partial(Recomputed, False), "eager", None, marks=pytest.mark.slow),
        (partial(Recomputed, True), "eager", None),
        (partial(Recomputed, False), "fx", None),
        (Net, "eager", None),
    ],
    ids=["routed", "recomputed", "recomputed reentrantly", "recomputed compiled", "plain"],
)
def test_it_gives_the_gradients_of_resharding_to_all(
    ranks4: RankPool, make: Callable[[], nn.Module], form: str, prepare: Callable[[Any], None] | None
) -> None:
    units = {"units": "auto"}
    whole = ranks4.run(gradients, make, form, units, prepare)
    parts = ranks4.run(gradients, make, form, {**units, **IN_PAIRS}, prepare)
    for (want, sent), (got, sent_in_parts) in zip(whole, parts, strict=True):
        assert want.keys() == got.keys()
        for name, grad in want.items():
            assert (grad is None and got[name] is None) or torch.equal(grad, got[name]), name
        assert len(sent) == len(sent_in_parts) and max(sent_in_parts) == 2 * max(sent)


def half_precision(form: str) -> bool:
    """Parts are in the gather dtype."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    want, _ = gradients(Net, form, {"mp_policy": policy})
    got, _ = gradients(Net, form, {"mp_policy": policy, **IN_PAIRS})
    return all(torch.equal(want[k], got[k]) for k in want)


@pytest.mark.parametrize("form", (pytest.param("eager", marks=pytest.mark.slow), "fx"))
def test_in_half_precision(ranks4: RankPool, form: str) -> None:
    assert all(ranks4.run(half_precision, form))


def switched(form: str) -> list[int]:
    """All-gathers of steps before and after the model is told to reshard to all ranks, and to none."""
    model: Any = fxshard.shard(nn.Sequential(nn.Linear(8, 8, bias=False)), mesh_of((4,)), **IN_PAIRS)
    forward, sent = compiled(model, form), []
    for reshard in (None, True, False):
        if reshard is not None:
            model.set_reshard_after_forward(reshard)
        forward(torch.ones(1, 8, requires_grad=True)).sum().backward()
        with collectives() as log:
            forward(torch.ones(1, 8, requires_grad=True)).sum().backward()
        sent.append([n for op, n in log if op == "all_gather"])
    return sent


@pytest.mark.parametrize("form", ("eager", "fx"))
def test_what_is_kept_can_be_changed_between_steps(ranks4: RankPool, form: str) -> None:
    for sent in ranks4.run(switched, form):
        assert sent == [[16, 32], [16, 16], [16]]


def test_a_rank_that_kept_no_part_says_so(fake_world: Any) -> None:
    with fake_world(4):
        model: Any = fxshard.fully_shard(nn.Linear(8, 8), **IN_PAIRS)
        [bucket] = model._fxshard_unit.buckets
        with pytest.raises(RuntimeError, match="from parts that 2 ranks kept of it, but this rank has not run its"):
            model._fxshard_unit.scope.parts.part(bucket)
