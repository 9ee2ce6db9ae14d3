"""Micro-batches of a small model with odd shapes, on every rank of a pool and plainly in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from training import compiled, full

import fxshard

BATCH = 16
OPS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce"}
Log = list[tuple[str, int]]
Prepare = Callable[[nn.Module], None]


class Block(nn.Module):
    """Rows that divide by no number of ranks; one parameter has fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)
        self.gain = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Trained:
    """Full gradients and parameters after each step; of each micro-batch, whether any ``.grad`` was there behind it and
    how many parameters' gradients waited; of each of the last step, the collectives, if they were to be noted."""

    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    params: list[dict[str, Tensor | None]] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    graded: list[bool] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def compare(self, other: Trained, tolerance: float = 1e-5) -> None:
        """Every tensor within ``tolerance`` of the largest entry of ``self``'s; None exactly where it is None."""
        for mine, theirs in ((self.grads, other.grads), (self.params, other.params)):
            assert len(mine) == len(theirs)
            for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                assert a.keys() == b.keys()
                for name, want in a.items():
                    got = b[name]
                    assert (want is None) == (got is None), f"step {step}: {name} is {got}, should be {want}"
                    if want is not None and got is not None:
                        atol = tolerance * max(want.abs().max().item(), 1e-3)
                        torch.testing.assert_close(got, want, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@contextmanager
def collectives() -> Iterator[Log]:
    """What this process launches through functional collectives: (op, elements of its input), in order.

    Calls of ops are watched, not a profile: torch's profiler corrupts memory when it stops near work of gloo's threads.
    """
    log: Log = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            space, _, op = str(getattr(self, "_qualified_op_name", "") or self._schema.name).partition("::")
            op = op.removesuffix("_out").removesuffix("_")
            if space == "_c10d_functional" and op in OPS and type(args[0]) in (Tensor, nn.Parameter):  # no fake one
                log.append((OPS[op], args[0].numel()))
            return call(self, *args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch._ops.OpOverload, torch._ops.OpOverloadPacket):
            patch.setattr(kind, "__call__", watched(kind.__call__))
        yield log


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(BATCH, 5, generator=generator), torch.randn(BATCH, 3, generator=generator)


def mesh_of(shape: Sequence[int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=("replicate", "shard")[-len(shape) :])


def set_flags(model: Any, flag: str) -> None:
    """``sync``; ``wait``: gradients are not reduced; ``park``: they are, over the shard dim alone."""
    model.set_requires_gradient_sync(flag != "wait")
    model.set_requires_all_reduce(flag == "sync")


def train(
    form: str,
    shape: Sequence[int],
    script: Sequence[Sequence[str]],
    *,
    make: Callable[[], nn.Module] = Net,
    prepare: Prepare | None = None,
    shard: dict[str, Any] | None = None,
    log: bool = False,
) -> Trained:
    """On every rank, or in one process with ``form`` "plain": one entry of ``script`` a step, one flag a micro-batch.

    ``prepare`` is called with the sharded model.
    ``log``: note the collectives of the last step, which takes a second a micro-batch.
    """
    torch.manual_seed(0)
    model: Any = make()
    part = slice(None)
    if form != "plain":
        rank, world = dist.get_rank(), dist.get_world_size()
        part = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        model = fxshard.shard(model, mesh_of(shape), **(shard or {}))
        if prepare is not None:
            prepare(model)
    forward = compiled(model, form if form != "plain" else "eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out, number = Trained(), 0
    for step, flags in enumerate(script):
        optimizer.zero_grad()
        logged = log and step == len(script) - 1
        for flag in flags:
            x, y = batch(number)
            number += 1
            if form == "plain":
                ((model(x) - y) ** 2).mean().backward()
                continue
            set_flags(model, flag)
            with collectives() if logged else nullcontext([]) as launched:
                ((forward(x[part]) - y[part]) ** 2).mean().backward()
            out.logs += [launched] * logged
            out.graded.append(any(p.grad is not None for p in model.parameters()))
            out.waiting.append(len(model.waiting_gradients()))
        out.grads.append({k: full(p.grad) for k, p in model.named_parameters()})
        optimizer.step()
        out.params.append({k: full(p) for k, p in model.named_parameters()})
    return out


def answer(results: list[Trained]) -> Trained:
    """Rank 0's, after every rank launched the same collectives in the same order and has the same full values."""
    for other in results[1:]:
        results[0].compare(other, tolerance=0)
        assert other.logs == results[0].logs
    return results[0]
