"""What a training step does around forward and backward."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from case_harness import (
    Batch,
    Decoder,
    Result,
    Surroundings,
    Tower,
    Training,
    adamw,
    case,
    full,
    layers,
    next_token,
    plain_step,
    sentences,
    sgd,
    vectors,
)
from torch import Tensor, nn


def micro_batches(training: Training, batch: Batch, synchronise_each: bool) -> Tensor:
    """Two backwards and one optimizer step."""
    training.optimizer.zero_grad()
    total = torch.zeros(())
    for k in range(2):
        part = {name: t[k::2] for name, t in batch.items()}  # the same samples however many ranks there are
        hold_back = not synchronise_each and k == 0
        training.model.micro_batch = k
        with training.around.unsynchronised(training.model) if hold_back else torch.enable_grad():
            loss = training.loss(training.call, part) / 2
            loss.backward()
        total += loss.detach()
    training.optimizer.step()
    return total


@case()
def accumulated_gradients(run: Surroundings) -> Result:
    return run.train(lambda: layers(6, 9, 5), vectors(16), step=lambda t, b: micro_batches(t, b, True))


@case(fast=True)
def accumulated_without_synchronisation(run: Surroundings) -> Result:
    return run.train(Tower, vectors(16), step=lambda t, b: micro_batches(t, b, False))


class Alternating(nn.Module):
    """Each micro-batch uses another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.micro_batch = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.second(x) if self.micro_batch else self.first(x)))


@case()
def last_micro_batch_uses_another_layer(run: Surroundings) -> Result:
    def shard(model: Any) -> None:
        run.shard(model, model.first, model.second)

    return run.train(Alternating, vectors(16), step=lambda t, b: micro_batches(t, b, False), shard=shard)


@case(ranks=(4,))
def replicas_synchronised_later(run: Surroundings) -> Result:
    """On a (replicate, shard) mesh the all-reduce over replicas waits for the last micro-batch."""

    def step(training: Training, batch: Batch) -> Tensor:
        training.optimizer.zero_grad()
        total = torch.zeros(())
        for k in range(2):
            if hasattr(training.model, "set_requires_all_reduce"):
                training.model.set_requires_all_reduce(k == 1)
            part = {name: t[k::2] for name, t in batch.items()}
            loss = training.loss(training.call, part) / 2
            loss.backward()
            total += loss.detach()
        training.optimizer.step()
        return total

    return run.train(Tower, vectors(16), step=step, shard=lambda m: run.shard(m, mesh=run.mesh(2)))


def clipped(training: Training, batch: Batch) -> Tensor:
    training.optimizer.zero_grad()
    loss = training.loss(training.call, batch)
    loss.backward()
    norm = full(nn.utils.clip_grad_norm_(training.model.parameters(), 0.05))
    training.optimizer.step()
    return loss + norm


@case()
def clipped_by_the_global_norm(run: Surroundings) -> Result:
    return run.train(lambda: layers(6, 7, 5), vectors(), step=clipped)


@case(ranks=(4,))
def replicas_count_once_in_the_norm(run: Surroundings) -> Result:
    return run.train(lambda: layers(6, 7, 5), vectors(), step=clipped, shard=lambda m: run.shard(m, mesh=run.mesh(2)))


@case()
def groups_by_number_of_dims_and_a_scheduler(run: Surroundings) -> Result:
    def grouped(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        matrices, rest = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.2}, {"params": rest, "lr": 0.05}], lr=0.02)

    def step(training: Training, batch: Batch) -> Tensor:
        if training.number == 0:
            rates = [0.1, 0.2]
            training.schedule = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, rates, total_steps=6)  # type: ignore[attr-defined]
        loss = plain_step(training, batch)
        training.schedule.step()  # type: ignore[attr-defined]
        return loss

    return run.train(Tower, vectors(), optimizer=grouped, step=step, steps=5)


@case()
def fused_adamw(run: Surroundings) -> Result:
    return run.train(lambda: layers(6, 3, 5), vectors(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.02, fused=True))


@case()
def first_step_of_adamw(run: Surroundings) -> Result:
    return run.train(Tower, vectors(), steps=1)


@case()
def scaler_skips_the_step_on_every_rank(run: Surroundings) -> Result:
    """One row of a table, on one rank, gets an infinite gradient."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)

    def step(training: Training, batch: Batch) -> Tensor:
        training.optimizer.zero_grad()
        loss = (training.call(batch["rows"]).sum(-1) * batch["boost"]).mean()
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        return loss

    g = torch.Generator().manual_seed(3)
    batches = [{"rows": (torch.arange(8) + s) % 8, "boost": torch.rand(8, generator=g)} for s in range(3)]
    batches[1]["boost"][0] = math.inf
    plain = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    result = run.train(lambda: nn.Embedding(8, 4), batches, optimizer=plain, step=step)
    return {**result, "scale": torch.tensor(scaler.get_scale())}


@case(fast=True)
def optimizer_step_inside_backward(run: Surroundings) -> Result:
    def apply_at_once(p: Any) -> None:
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.1)
        p.grad = None

    def hook(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(apply_at_once)

    def step(training: Training, batch: Batch) -> Tensor:
        loss = training.loss(training.call, batch)
        loss.backward()
        return loss

    return run.train(Tower, vectors(), step=step, before=hook)


@case()
def hooks_on_parameters(run: Surroundings) -> Result:
    """Registered before and after sharding; each fires once a backward, and its result counts."""
    calls: list[int] = []

    def halve(grad: Tensor) -> Tensor:
        calls.append(1)
        return grad * 0.5

    def build() -> nn.Module:
        model = layers(6, 9, 5)
        model[0].weight.register_hook(halve)
        return model

    def hook(model: Any) -> None:
        model[2].weight.register_hook(halve)

    result = run.train(build, vectors(), optimizer=sgd, before=hook)
    return {**result, "calls": torch.tensor(len(calls))}


@case()
def parameters_clamped_between_steps(run: Surroundings) -> Result:
    def step(training: Training, batch: Batch) -> Tensor:
        loss = plain_step(training, batch)
        with torch.no_grad():
            for p in training.model.parameters():
                p.data.clamp_(-0.2, 0.2)
        return loss

    return run.train(lambda: layers(6, 9, 5), vectors(), step=step)


@case(refusal="sharded")
def penalty_formed_outside_forward(run: Surroundings) -> Result:
    def step(training: Training, batch: Batch) -> Tensor:
        training.optimizer.zero_grad()
        penalty = sum(p.pow(2).sum() for p in training.model.parameters())
        loss = training.loss(training.call, batch) + 0.05 * penalty
        loss.backward()
        training.optimizer.step()
        return loss

    return run.train(lambda: layers(6, 7, 5), vectors(), step=step)


def validate_between(context: Any) -> Any:
    def step(training: Training, batch: Batch) -> Tensor:
        training.call.eval()
        with context():
            before = training.loss(training.call, batch)
        training.call.train()
        return plain_step(training, batch) + before

    return step


@case()
def validation_without_gradients(run: Surroundings) -> Result:
    return run.train(Tower, vectors(), step=validate_between(torch.no_grad))


@case()
def validation_in_inference_mode(run: Surroundings) -> Result:
    def step(training: Training, batch: Batch) -> Tensor:
        training.call.eval()
        with torch.inference_mode():
            before = float(training.loss(training.call, batch))
        training.call.train()
        return plain_step(training, batch) + before

    return run.train(Tower, vectors(), step=step)


@case()
def loss_divided_by_the_tokens_of_all_ranks(run: Surroundings) -> Result:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["tokens"][:, :-1])
        each = F.cross_entropy(logits.transpose(1, 2), batch["tokens"][:, 1:], reduction="none")
        return (each * batch["weights"]).sum(1).mean()

    lengths = torch.tensor([6, 6, 6, 6, 1, 1, 2, 3])
    keep = (torch.arange(6) < lengths.unsqueeze(1)).float()
    batch = {**sentences(), "weights": keep / keep.sum() * 8}
    return run.train(lambda: Decoder(tied=True), batch, loss, optimizer=adamw)


@case()
def forward_of_another_sharded_model_in_the_loss(run: Surroundings) -> Result:
    torch.manual_seed(3)
    teacher = Decoder()
    run.shard(teacher)
    taught = run.compile(teacher)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = taught(batch["tokens"][:, :-1])
        return next_token(model, batch) + F.mse_loss(model(batch["tokens"][:, :-1]), target)

    return run.train(lambda: Decoder(tied=True), sentences(), loss)
