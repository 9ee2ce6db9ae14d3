"""Uncompiled backwards overlap as the plans of compiled ones do, and gradients come when backward has ended."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from micro_steps import mesh_of
from ranks import RankPool
from torch import Tensor, nn
from training import compiled, full

import fxshard
from fxshard import comm
from fxshard.unit import units_of

LAYERS = 4


def layered() -> Any:
    """Layers of different sizes, each a unit, on two replicas of two shards."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(5 + i, 6 + i) for i in range(LAYERS)])
    for layer in model:
        fxshard.fully_shard(layer, mesh=mesh_of((2, 2)))
    return fxshard.fully_shard(model, mesh=mesh_of((2, 2)))


def backward(at_once: bool) -> tuple[list[str], list[Tensor | None]]:
    """Launches and waits of the second backward, by layer, and the gradients; ``at_once`` waits at each launch."""
    model = layered()
    flight = model._fxshard_unit.scope.in_flight
    layer = {layer._fxshard_unit.buckets[0].layout.size: i for i, layer in enumerate(model)}
    layer |= {size // 2: i for size, i in layer.items()}  # segments
    said: list[str] = []
    names = [f"{when}_{what}" for when in ("start", "finish") for what in ("reduce_scatter", "all_reduce")]
    saved = {name: getattr(comm, name) for name in names}

    def logged(name: str) -> Any:
        when, _, what = name.partition("_")

        def run(*args: Any) -> Tensor:
            said.append(f"{'launch' if when == 'start' else 'wait'} {what} {layer[args[-3].numel()]}")
            return saved[name](*args)

        return run

    launch = flight.launch

    def launch_and_wait(*args: Any) -> None:
        launch(*args)
        flight.drain()

    if at_once:
        flight.launch = launch_and_wait
    for name in names:
        setattr(comm, name, logged(name))
    try:
        for _ in range(2):
            said.clear()
            model.zero_grad()
            x = torch.randn(3, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
            model(x).square().mean().backward()
    finally:
        for name, function in saved.items():
            setattr(comm, name, function)
    return said, [full(p.grad) for p in model.parameters()]


def test_a_reduction_is_waited_for_behind_the_next_layer_and_its_all_reduce_behind_the_one_after(
    ranks4: RankPool,
) -> None:
    logs = [said for said, _ in ranks4.run(backward, False)]
    assert logs == [
        [
            "launch reduce_scatter 3",
            *("wait reduce_scatter 3", "launch all_reduce 3", "launch reduce_scatter 2"),
            *("wait all_reduce 3", "wait reduce_scatter 2", "launch all_reduce 2", "launch reduce_scatter 1"),
            *("wait all_reduce 2", "wait reduce_scatter 1", "launch all_reduce 1", "launch reduce_scatter 0"),
            *("wait all_reduce 1", "wait reduce_scatter 0", "launch all_reduce 0", "wait all_reduce 0"),
        ]
    ] * 4


def test_waiting_at_each_launch_changes_no_bit(ranks4: RankPool) -> None:
    overlapped, waited = ranks4.run(backward, False)[0], ranks4.run(backward, True)[0]
    assert all(a.split()[1:] == b.split()[1:] for a, b in pairwise(waited[0]) if a.startswith("launch"))
    assert all(torch.equal(a, b) for a, b in zip(overlapped[1], waited[1], strict=True))  # type: ignore[arg-type]


def seen_in_backward(form: str) -> tuple[list[bool], bool]:
    """Whether any ``.grad`` is there when gradients reach the second layer, and the input; and behind backward."""
    model = layered()
    forward, seen = compiled(model, form), []

    def look(*_: Any) -> None:
        seen.append(any(p.grad is not None for p in model.parameters()))

    x = torch.ones(3, 5, requires_grad=True)
    x.register_hook(look)
    if form == "eager":
        model[1].register_full_backward_hook(look)
    forward(x).sum().backward()
    return seen, all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("form", ("eager", "fx"))
def test_no_gradient_is_there_before_backward_has_ended(ranks4: RankPool, form: str) -> None:
    looks = 2 if form == "eager" else 1
    assert ranks4.run(seen_in_backward, form) == [([False] * looks, True)] * 4


def uneven(steps: int) -> tuple[Counter[str], list[Tensor | None]]:
    """On rank 0 alone the second and third layer are used; where the list of collectives is learned, and where not."""
    torch.manual_seed(0)
    model: Any = nn.ModuleList(nn.Linear(5, 5) for _ in range(LAYERS))
    for layer in model:
        fxshard.fully_shard(layer, mesh=mesh_of((2, 2)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            for i in (3, 2, 1, 0) if dist.get_rank() == 0 else (3, 0):
                x = x + self.layers[i](x)
            return x

    net: Any = fxshard.fully_shard(Net(), mesh=mesh_of((2, 2)))
    for _ in range(steps):
        net.zero_grad()
        net(torch.ones(2, 5)).sum().backward()
    waiting = Counter(b.name for u in units_of(net) for b in u.buckets if b.unreduced.ids)
    return waiting, [full(p.grad) for p in net.parameters()]


@pytest.mark.parametrize("steps", [1, 3])
def test_ranks_that_use_other_layers_in_another_order_reduce_all(ranks4: RankPool, steps: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 5) for _ in range(LAYERS)]
    for used in ((3, 2, 1, 0), (3, 0), (3, 0), (3, 0)):
        x = torch.ones(2, 5)
        for i in used:
            x = x + layers[i](x)
        (x.sum() / 4).backward()
    expected = [p.grad for layer in layers for p in layer.parameters()]
    for waiting, grads in ranks4.run(uneven, steps):
        assert not waiting
        for got, want in zip(grads, expected, strict=True):
            torch.testing.assert_close(got, want)
