"""From building a model to copying, converting, saving and loading it; meshes."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from case_harness import (
    Batch,
    Decoder,
    Result,
    Surroundings,
    Training,
    adamw,
    case,
    full,
    layers,
    next_token,
    plain_step,
    sentences,
    squares,
    vectors,
)
from torch import Tensor, nn

import fxshard
from fxshard import checkpoint


@case(ranks=(4,))
def replicas_of_shards(run: Surroundings) -> Result:
    results: Result = {}
    for replicate in (2, 4, 1):
        trained = run.train(
            lambda: Decoder(tied=True),
            sentences(),
            next_token,
            shard=lambda m, replicate=replicate: run.shard(m, mesh=run.mesh(replicate)),
        )
        results.update({f"{replicate} replicas: {name}": value for name, value in trained.items()})
    return results


@case()
def layers_cut_along_other_dims(run: Surroundings) -> Result:
    from torch.distributed.tensor import Shard

    def shard(model: nn.Module) -> None:
        run.shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))

    return run.train(lambda: Decoder(tied=True), sentences(), next_token, shard=shard)


@case()
def ranks_initialised_differently(run: Surroundings) -> Result:
    """The first rank's values win."""

    def build() -> nn.Module:
        model = layers(6, 9, 5)
        with torch.no_grad():
            for p in list(model.parameters())[1:]:
                p.add_(run.rank)
        return model

    return run.train(build, vectors())


@case()
def built_on_the_meta_device(run: Surroundings) -> Result:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(6, 7, 5)
            self.register_buffer("ramp", torch.linspace(0, 1, 6), persistent=False)
            self.register_buffer("scale", torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x + self.ramp) * self.scale

    def build() -> nn.Module:
        with torch.device("meta"):
            return Scaled()

    def fill(model: Any) -> None:
        model.to_empty(device="cpu")
        torch.manual_seed(7)
        model.load_state_dict(Scaled().state_dict())
        with torch.no_grad():
            model.ramp.copy_(torch.linspace(0, 1, 6))

    return run.train(build, vectors(), before=fill)


@case()
def copied_as_a_teacher(run: Surroundings) -> Result:
    """A deep copy is independent, and an average of weights over steps can be kept in it."""
    torch.manual_seed(7)
    model = layers(6, 7, 5)
    run.shard(model)
    teacher = copy.deepcopy(model).requires_grad_(False)
    training = Training(run, model, run.compile(model), squares)
    training.optimizer = adamw(model.parameters())
    for _ in range(3):
        plain_step(training, run.part(vectors()))
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast.detach(), 0.3)
    with torch.no_grad():
        taught = run.mean(squares(run.compile(teacher.eval()), run.part(vectors())))
    copied = {f"teacher {name}": value for name, value in run.state(teacher).items()}
    return {**run.state(model), **copied, "loss of the teacher": taught}


@case()
def copy_trained_alone(run: Surroundings) -> Result:
    torch.manual_seed(7)
    model = Decoder(tied=True)
    run.shard(model)
    squares_of = {k: full(v).square().sum() for k, v in model.state_dict().items()}
    twin = copy.deepcopy(run.compile(model))
    training = Training(run, twin, twin, next_token)
    training.optimizer = adamw(twin.parameters())
    for _ in range(2):
        plain_step(training, run.part(sentences()))
    return {**{f"model {k}": v for k, v in squares_of.items()}, **run.state(model), **run.state(twin)}


@case()
def copied_between_backward_and_step(run: Surroundings) -> Result:
    """A copy of a parameter has no gradient; recurrent layers read their parameters while they are copied."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.lstm(x.unsqueeze(1))[0].squeeze(1))

    torch.manual_seed(7)
    model = Recurrent()
    run.shard(model)
    squares(run.compile(model), run.part(vectors())).backward()
    twin = copy.deepcopy(model)
    copied = {f"copied {name}": value for name, value in run.state(twin).items()}
    training = Training(run, twin, run.compile(twin), squares)
    training.optimizer = adamw(twin.parameters())
    losses = {f"loss {i}": run.mean(plain_step(training, run.part(vectors()))) for i in range(2)}
    return {**copied, **losses, **run.state(twin)}


@case()
def saved_and_resumed(run: Surroundings) -> Result:
    """What is trained after the save is undone by loading into a model and optimizer built anew."""
    torch.manual_seed(7)
    first, again = started(run), started(run, zero=True)
    batch = run.part(sentences())
    for _ in range(2):
        plain_step(first, batch)
    if isinstance(first.model.head.weight, fxshard.LayoutTensor):
        folder: list[Any] = [tempfile.mkdtemp() if run.rank == 0 else None]
        dist.broadcast_object_list(folder)
        checkpoint.save(first.model, first.optimizer, Path(folder[0], "saved"))
        plain_step(first, batch)
        checkpoint.load(again.model, again.optimizer, Path(folder[0], "saved"))
    else:
        again.model.load_state_dict(first.model.state_dict())
        again.optimizer.load_state_dict(first.optimizer.state_dict())
    losses = {f"loss {i}": run.mean(plain_step(again, batch)) for i in range(2)}
    return {**losses, **run.state(again.model)}


def started(run: Surroundings, zero: bool = False) -> Training:
    model = Decoder(tied=True)
    if zero:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
    run.shard(model)
    training = Training(run, model, run.compile(model), next_token)
    training.optimizer = adamw(model.parameters())
    return training


@case()
def state_assigned_and_copied_between_steps(run: Surroundings) -> Result:
    """``load_state_dict`` of full values, and of another sharded model's parameters with ``assign=True``."""
    torch.manual_seed(11)
    values, other = layers(6, 9, 5).state_dict(), layers(6, 9, 5)
    run.shard(other)

    def step(training: Training, batch: Batch) -> Tensor:
        if training.number == 1:
            training.model.load_state_dict(values)
        if training.number == 2:
            training.model.load_state_dict(other.state_dict(), assign=True)
            training.optimizer = adamw(training.model.parameters())
        return plain_step(training, batch)

    return run.train(lambda: layers(6, 9, 5), vectors(), step=step, steps=4)


@case(tolerance=3e-2)
def converted_after_sharding(run: Surroundings) -> Result:
    def convert(model: nn.Module) -> None:
        model.to(torch.bfloat16)

    def step(training: Training, batch: Batch) -> Tensor:
        if training.number == 2:
            training.model.float()
        dtype = next(training.model.parameters()).dtype
        training.optimizer.zero_grad()
        loss = squares(training.call, {k: v.to(dtype) for k, v in batch.items()}).float()
        loss.backward()
        training.optimizer.step()
        return loss

    plain = lambda params: torch.optim.SGD(params, lr=0.05)  # noqa: E731
    return run.train(lambda: layers(6, 9, 5), vectors(), before=convert, step=step, optimizer=plain, steps=4)
