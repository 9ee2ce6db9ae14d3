"""The demo's two trainings: sharded over the ranks of a run, and the same model unsharded in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call
from tqdm import tqdm

import fxshard
from fxshard.demo_model import ByteTransformer, Size
from fxshard.demo_text import batches
from fxshard.distributed import DistributedState, all_reduce

_SEED = 0


@dataclass(frozen=True)
class Training:
    """What both trainings have in common. ``rows`` of ``size.context`` bytes are a rank's part of a batch."""

    steps: int = 60
    rows: int = 4
    learning_rate: float = 1e-3
    bf16: bool = False  # full parameters, and so compute; storage, reduction and optimizer stay fp32
    size: Size = field(default_factory=Size)


@dataclass(frozen=True)
class Curve:
    """Loss of every step before its update, mean over the global batch, in nats per byte; seconds of every step."""

    losses: list[float]
    seconds: list[float]


def train_sharded(training: Training, text: bytes, state: DistributedState, codegen: str) -> Curve:
    """Train over all ranks of the run through ``backend="fxshard"``. Collective; the losses are equal on every rank."""
    mesh = init_device_mesh(state.device.type, (state.world_size,)) if state.world_size > 1 else None
    policy = fxshard.MixedPrecisionPolicy()
    if training.bf16:
        policy = fxshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fxshard.shard(_new_model(training.size), mesh, mp_policy=policy)
    # An order of collectives other than the one that the dump shows is an error: the demo reports what is dumped.
    step = torch.compile(model, backend="fxshard", options={"codegen": codegen, "check_order": "error"})
    own = slice(state.rank * training.rows, (state.rank + 1) * training.rows)

    def backward(tokens: Tensor, targets: Tensor) -> float:
        loss = step(tokens[own], targets[own])
        loss.backward()
        return loss.item()

    curve = _train(training, model, text, state, backward, f"sharded, {state.world_size} ranks")
    losses = all_reduce("demo losses", lambda: curve.losses, _mean_of_each)
    return Curve(losses, curve.seconds)


def train_unsharded(training: Training, text: bytes, state: DistributedState) -> Curve:
    """Train in this process alone, plainly: no fxshard, no compiler, the whole of each global batch. Not collective.

    In bf16 parameters are cast as a sharded model's are, and gradients rounded to bf16 for each rank's rows and added
    in fp32.
    """
    model = _new_model(training.size).to(state.device)
    pieces = state.world_size if training.bf16 else 1

    def backward(tokens: Tensor, targets: Tensor) -> float:
        total = 0.0
        for piece in zip(tokens.chunk(pieces), targets.chunk(pieces), strict=True):
            if training.bf16:
                cast = {name: p.to(torch.bfloat16) for name, p in model.named_parameters()}
                loss = functional_call(model, cast, piece) / pieces
            else:
                loss = model(*piece)
            loss.backward()
            total += loss.item()
        return total

    return _train(training, model, text, state, backward, "unsharded, 1 process")


def _train(
    training: Training,
    model: nn.Module,
    text: bytes,
    state: DistributedState,
    backward: Callable[[Tensor, Tensor], float],
    title: str,
) -> Curve:
    """``backward`` makes the gradients of a global batch and returns the loss, which rank 0's progress bar shows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate)
    drawn = batches(text, state.world_size * training.rows, training.size.context, _SEED)
    curve = Curve([], [])
    with tqdm(total=training.steps, desc=title, unit="step", disable=not state.is_main) as bar:
        for _ in range(training.steps):
            began = time.perf_counter()
            tokens, targets = (part.to(state.device) for part in next(drawn))
            curve.losses.append(backward(tokens, targets))
            optimizer.step()
            optimizer.zero_grad()
            curve.seconds.append(time.perf_counter() - began)
            bar.set_postfix(loss=f"{curve.losses[-1]:.4f}", refresh=False)
            bar.update()
    return curve


def _mean_of_each(curves: list[list[float]]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*curves, strict=True)]


def _new_model(size: Size) -> ByteTransformer:
    torch.manual_seed(_SEED)
    return ByteTransformer(size)


def parameter_count(size: Size) -> int:
    """Elements of all parameters of the demo's model."""
    with torch.device("meta"):
        return sum(p.numel() for p in ByteTransformer(size).parameters())
