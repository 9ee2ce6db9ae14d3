"""Cases: small trainings that are run plainly and sharded, and must come to the same.

A case is a function of a ``Surroundings`` that builds models, trains them and returns named tensors. It is run once as
one eager process that sees the whole batch, and once in every rank of a job, sharded, on its contiguous part of the
batch. Losses are means over samples, so averaged gradients reproduce the one process. Names, shapes, dtypes and which
values are None must be equal, and values within ``tolerance``: ``|a - b| / (1 + |a|)``.

The forms of the sharded run: ``eager`` (no compiler), ``fx`` (our backend without Inductor) and ``inductor``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import reset_dynamo
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxshard

FORMS = ("eager", "fx", "inductor")
OPTIONS: dict[str, dict[str, Any]] = {
    "fx": {"codegen": "eager"},
    "inductor": {"inductor": {"fallback_random": True}},  # else it draws other random numbers than eager code
}

Batch = dict[str, Tensor]
Result = dict[str, Tensor | None]
Loss = Callable[[Any, Batch], Tensor]


@dataclass(frozen=True)
class Case:
    """A function and what is to hold of it.

    ``ranks``: world sizes that it says something about. ``refusal``: an error of the sharded run that is an answer too,
    if every rank raises it with a text that this pattern finds. ``averaged``: the result depends on how the batch is
    cut, so the oracle is eager data parallelism with averaged gradients. ``fast``: compiled in the default test run.
    ``needs``: a library that it takes its model from; such a case runs in the slow tests only.
    """

    name: str
    group: str
    run: Callable[[Surroundings], Result]
    tolerance: float = 1e-5
    ranks: tuple[int, ...] = (1, 2, 4)
    refusal: str = ""
    averaged: bool = False
    fast: bool = False
    needs: str = ""

    @property
    def available(self) -> bool:
        return not self.needs or importlib.util.find_spec(self.needs) is not None


CASES: dict[str, Case] = {}


def case(**facts: Any) -> Callable[[Callable[[Any], Result]], Callable[[Any], Result]]:
    """Register a function as a case, under its name."""

    def register(fn: Callable[[Any], Result]) -> Callable[[Any], Result]:
        group = fn.__module__.removeprefix("case_")
        CASES[fn.__name__] = Case(name=fn.__name__, group=group, run=fn, **facts)
        return fn

    return register


# -- where a case runs -----------------------------------------------------------------------------------------------


class Surroundings:
    """One eager process with the whole batch: the oracle. The methods are what a case may ask for."""

    rank, world = 0, 1
    form = "plain"

    def shard(self, model: nn.Module, *units: nn.Module, **options: Any) -> nn.Module:
        """Shard a model in place, with ``units`` as units of their own where some are given."""
        return model

    def compile(self, model: Any, **options: Any) -> Any:
        """The callable to train with."""
        return model

    def mesh(self, replicate: int) -> DeviceMesh | None:
        """A (replicate, shard) mesh."""
        return None

    def part(self, batch: Batch) -> Batch:
        """This rank's samples; ``all_`` in front of a name: the same on every rank."""
        size = next(len(t) for name, t in batch.items() if not name.startswith("all_")) // self.world
        mine = slice(self.rank * size, (self.rank + 1) * size)
        return {name: t if name.startswith("all_") else t[mine] for name, t in batch.items()}

    def mean(self, value: Tensor) -> Tensor:
        """The mean over ranks."""
        return value.detach().clone()

    def unsynchronised(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Within it, backward accumulates and does not reduce."""
        return contextlib.nullcontext()

    def average(self, model: nn.Module) -> None:
        """Average gradients, where backward has not done it."""

    def state(self, model: nn.Module) -> Result:
        """Full parameters and buffers, and full gradients as they stand."""
        values: Result = {k: full(v) for k, v in model.state_dict().items()}
        grads = {f"grad {k}": None if p.grad is None else full(p.grad) for k, p in model.named_parameters()}
        return {k.replace("_orig_mod.", ""): v for k, v in {**values, **grads}.items()}

    def train(
        self,
        build: Callable[[], nn.Module],
        batches: Batch | Sequence[Batch],
        loss: Loss | None = None,
        *,
        steps: int = 3,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        step: Callable[[Training, Batch], Tensor] | None = None,
        before: Callable[[nn.Module], None] | None = None,
        shard: Callable[[nn.Module], Any] | None = None,
        **compile_options: Any,
    ) -> Result:
        """Build, shard, compile and train; losses, parameters, buffers and the last gradients.

        ``step(training, batch)`` returns a loss; ``before(model)`` runs on the sharded model, before it is compiled.
        """
        torch.manual_seed(7)
        model = build()
        (shard or self.shard)(model)
        if before is not None:
            before(model)
        running = Training(self, model, self.compile(model, **compile_options), loss or squares)
        running.optimizer = (optimizer or adamw)(model.parameters())
        result: Result = {}
        for i in range(steps):
            torch.manual_seed(1000 + i)
            running.number = i
            batch = batches if isinstance(batches, Mapping) else batches[i % len(batches)]
            result[f"loss {i}"] = self.mean((step or plain_step)(running, self.part(batch)))
        return {**result, **self.state(model)}


@dataclass
class Training:
    """A model on its way: ``model`` is the module itself, ``call`` what was compiled from it."""

    around: Surroundings
    model: Any
    call: Any
    loss: Loss
    optimizer: torch.optim.Optimizer = field(init=False)
    number: int = 0


def plain_step(training: Training, batch: Batch) -> Tensor:
    training.optimizer.zero_grad()
    loss = training.loss(training.call, batch)
    loss.backward()
    training.around.average(training.model)
    training.optimizer.step()
    return loss


class Sharded(Surroundings):
    """One rank of a job in the default process group."""

    def __init__(self, form: str) -> None:
        self.form, self.rank, self.world = form, dist.get_rank(), dist.get_world_size()

    def shard(self, model: nn.Module, *units: nn.Module, **options: Any) -> nn.Module:
        for unit in units:
            fxshard.fully_shard(unit, **options)
        return fxshard.fully_shard(model, **options) if units else fxshard.shard(model, **options)  # type: ignore[return-value]

    def compile(self, model: Any, **options: Any) -> Any:
        return (
            model
            if self.form == "eager"
            else torch.compile(model, backend="fxshard", options=OPTIONS[self.form], **options)
        )

    def mesh(self, replicate: int) -> DeviceMesh | None:
        return init_device_mesh("cpu", (replicate, self.world // replicate), mesh_dim_names=("replicate", "shard"))

    def mean(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.world

    @contextlib.contextmanager
    def unsynchronised(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


class Averaged(Sharded):
    """Eager data parallelism, unsharded: the oracle where results depend on how the batch is cut."""

    def __init__(self) -> None:
        super().__init__("eager")

    def shard(self, model: nn.Module, *units: nn.Module, **options: Any) -> nn.Module:
        return model

    def average(self, model: nn.Module) -> None:
        for p in model.parameters():
            flag = torch.tensor(0 if p.grad is None else 1)
            dist.all_reduce(flag)
            if flag:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= self.world


# -- running and comparing -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    good: bool
    text: str


def run_case(name: str, form: str) -> Outcome:
    """One case in this rank; collective."""
    found = CASES[name]
    warnings.simplefilter("ignore")
    oracle = found.run(Averaged() if found.averaged else Surroundings())
    reset_dynamo()
    try:
        result = found.run(Sharded(form))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if found.refusal and re.search(found.refusal, str(error)):
            return Outcome(True, f"refused: {text[:100]}")
        raise
    off, where = difference(oracle, result)
    return Outcome(off <= found.tolerance, f"off by {off:.1e} at {where}")


def difference(a: Result, b: Result) -> tuple[float, str]:
    """The largest difference and where it is; infinite where the kind of a value differs."""
    if a.keys() != b.keys():
        return float("inf"), f"names: {sorted(a.keys() ^ b.keys())}"
    worst, where = 0.0, "nothing"
    for name, x in a.items():
        y = b[name]
        if (x is None) != (y is None):
            return float("inf"), f"{name}: {'None' if x is None else 'a value'} became {'None' if y is None else 'one'}"
        if x is None or y is None:
            continue
        if x.shape != y.shape or x.dtype != y.dtype:
            return float("inf"), f"{name}: {tuple(x.shape)} {x.dtype} became {tuple(y.shape)} {y.dtype}"
        if x.is_complex():
            x, y = torch.view_as_real(x), torch.view_as_real(y)
        x, y = x.double(), y.double()
        if not torch.equal(x.isfinite(), y.isfinite()):
            return float("inf"), f"{name}: not finite in other places"
        off = ((x - y).abs() / (1 + x.abs())).nan_to_num().flatten()
        if off.numel() and float(off.max()) >= worst:
            worst, where = float(off.max()), name
    return worst, where


def full(value: Any) -> Tensor:
    """A whole value in memory of its own, dense, resolved."""
    value = value.detach()
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    value = value.to_dense() if value.layout is not torch.strided else value
    return value.clone().resolve_conj()


# -- what many cases use ---------------------------------------------------------------------------------------------


def squares(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def next_token(model: Any, batch: Batch) -> Tensor:
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def vectors(n: int = 8, inputs: int = 6, outputs: int = 5, seed: int = 1) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(n, inputs, generator=g), "y": torch.randn(n, outputs, generator=g)}


def sentences(n: int = 8, length: int = 7, vocab: int = 13, seed: int = 1) -> Batch:
    return {"tokens": torch.randint(0, vocab, (n, length), generator=torch.Generator().manual_seed(seed))}


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def layers(*sizes: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers with activations in between."""
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*[m for a, b in pairs for m in (nn.Linear(a, b), act())][:-1])


class Block(nn.Module):
    """A residual block, a unit where it stands in a list of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Embedding, blocks, head: the shape of a language model."""

    def __init__(self, vocab: int = 13, width: int = 8, depth: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tower(nn.Module):
    """A projection, blocks and an output layer, on vectors."""

    def __init__(self, depth: int = 2, width: int = 8) -> None:
        super().__init__()
        self.project = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.out(x)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)
