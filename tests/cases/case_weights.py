"""Which weights take part: shared, used several times, frozen, unused."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from case_harness import (
    Batch,
    Decoder,
    Result,
    Surroundings,
    Tower,
    Training,
    case,
    layers,
    next_token,
    plain_step,
    sentences,
    vectors,
)
from torch import Tensor, nn


@case(fast=True)
def tied_embedding_and_head(run: Surroundings) -> Result:
    return run.train(lambda: Decoder(tied=True), sentences(), next_token)


@case()
def one_matrix_in_several_layers(run: Surroundings) -> Result:
    def build() -> nn.Module:
        model = Decoder(depth=3)
        for block in model.blocks[1:]:
            block.up.weight = model.blocks[0].up.weight  # type: ignore[union-attr]
        return model

    return run.train(build, sentences(), next_token)


@case()
def block_that_stands_in_two_lists(run: Surroundings) -> Result:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            self.up = nn.ModuleList([self.down[1], self.down[0]])
            self.out = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            for layer in [*self.down, *self.up]:
                x = x + torch.tanh(layer(x))
            return self.out(x)

    return run.train(Twice, vectors())


@case()
def layer_called_three_times(run: Surroundings) -> Result:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.Linear(6, 6), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x + torch.tanh(self.cell(x))
            return self.out(x)

    return run.train(Cell, vectors())


@case(fast=True)
def forwards_then_backwards(run: Surroundings) -> Result:
    def step(training: Training, batch: Batch) -> Tensor:
        training.optimizer.zero_grad()
        losses = [F.mse_loss(training.call(batch["x"] * scale), batch["y"]) for scale in (1.0, 0.5)]
        for loss in losses:
            loss.backward()
        training.optimizer.step()
        return sum(losses)  # type: ignore[return-value]

    return run.train(Tower, vectors(), step=step)


@case()
def several_forwards_one_backward(run: Surroundings) -> Result:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return sum(F.mse_loss(model(batch["x"] * scale), batch["y"]) for scale in (1.0, 0.5, 0.25))  # type: ignore[return-value]

    return run.train(lambda: layers(6, 9, 5), vectors(), loss)


@case(refusal="retain_graph|second time|twice")
def backward_twice_over_one_graph(run: Surroundings) -> Result:
    def step(training: Training, batch: Batch) -> Tensor:
        training.optimizer.zero_grad()
        out = training.call(batch["x"])
        first, second = F.mse_loss(out, batch["y"]), out.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        training.optimizer.step()
        return first + second

    return run.train(lambda: layers(6, 9, 5), vectors(), step=step)


class Adapted(nn.Module):
    """A frozen linear layer with a trainable update of low rank."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, inputs) * 0.3)
        self.up = nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


@case()
def frozen_base_with_adapters(run: Surroundings) -> Result:
    return run.train(lambda: nn.Sequential(Adapted(6, 10), nn.ReLU(), Adapted(10, 5)), vectors())


@case()
def trainable_layer_below_frozen_ones(run: Surroundings) -> Result:
    def build() -> nn.Module:
        model = layers(6, 9, 8, 5)
        model[2:].requires_grad_(False)
        return model

    return run.train(build, vectors())


@case()
def weight_frozen_bias_trained(run: Surroundings) -> Result:
    def build() -> nn.Module:
        model = layers(6, 9, 5)
        model[0].weight.requires_grad_(False)
        model[2].bias.requires_grad_(False)  # type: ignore[union-attr,operator]
        return model

    return run.train(build, vectors())


@case(fast=True)
def frozen_and_unfrozen_between_steps(run: Surroundings) -> Result:
    def step(training: Training, batch: Batch) -> Tensor:
        model = training.model
        if training.number == 0:
            model[0].requires_grad_(False)
        if training.number == 2:
            model[0].requires_grad_(True)
        if training.number == 4:
            model[2].requires_grad_(False)
        with torch.no_grad():
            training.call(batch["x"])  # a validation in between
        return plain_step(training, batch)

    return run.train(lambda: layers(6, 9, 5), vectors(), step=step, steps=6)


@case()
def single_parameters_frozen_in_turn(run: Surroundings) -> Result:
    def step(training: Training, batch: Batch) -> Tensor:
        for i, p in enumerate(training.model.parameters()):
            p.requires_grad = (i + training.number) % 3 != 0
        return plain_step(training, batch)

    return run.train(Tower, vectors(), step=step, steps=4)


@case()
def parameter_that_no_step_uses(run: Surroundings) -> Result:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.spare = layers(6, 9, 5), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    return run.train(Spare, vectors())


@case()
def encoders_take_turns(run: Surroundings) -> Result:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoders = nn.ModuleList([nn.Linear(6, 8), nn.Linear(6, 8)])
            self.head = nn.Linear(8, 5)
            self.turn = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.encoders[self.turn](x)))

    def step(training: Training, batch: Batch) -> Tensor:
        training.model.turn = training.number % 2
        return plain_step(training, batch)

    return run.train(Turns, vectors(), step=step, steps=5)


@case()
def gradient_thrown_away_by_the_user(run: Surroundings) -> Result:
    def step(training: Training, batch: Batch) -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(training.call, batch)
        loss.backward()
        if training.number < 2:
            training.model[2].weight.grad = None
        training.optimizer.step()
        return loss

    return run.train(lambda: layers(6, 9, 5), vectors(), step=step, steps=4)
