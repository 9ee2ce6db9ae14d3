"""Branches, experts, recomputation, graph breaks, changing shapes: code that is not the same in every step or rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from case_harness import (
    OPTIONS,
    Batch,
    Block,
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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

# -- activation checkpointing ----------------------------------------------------------------------------------------


class Checkpointed(Tower):
    reentrant = False

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=self.reentrant)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


@case(fast=True)
def checkpointed_blocks(run: Surroundings) -> Result:
    return run.train(Checkpointed, vectors())


@case()
def checkpointed_blocks_reentrant(run: Surroundings) -> Result:
    return run.train(CheckpointedReentrant, vectors())


@case()
def checkpointed_blocks_by_wrapper(run: Surroundings) -> Result:
    def build() -> nn.Module:
        model = Tower()
        model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
        return model

    return run.train(build, vectors())


@case()
def checkpointed_with_a_random_mask(run: Surroundings) -> Result:
    class Masked(Tower):
        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            return checkpoint(self.masked, block, x, use_reentrant=False)

        def masked(self, block: nn.Module, x: Tensor) -> Tensor:
            return block(x) * (torch.rand(1, x.shape[1]) > 0.3) / 0.7

    return run.train(Masked, vectors())


@case()
def checkpointed_parameters_of_the_root(run: Surroundings) -> Result:
    """The recomputed function calls no unit's forward."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Parameter(torch.randn(5, 6) * 0.3)

        def inner(self, x: Tensor) -> Tensor:
            return torch.tanh(self.first(x)) @ self.last.t()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    return run.train(Root, vectors())


@case()
def recomputed_reentrantly_and_used_again(run: Surroundings) -> Result:
    """The backward inside the backward gives the same parameters a gradient as the outer one."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([layers(6, 6, 6), layers(6, 6, 6)])

        def forward(self, x: Tensor) -> Tensor:
            first, last = self.blocks
            x = checkpoint(last, first(x), use_reentrant=True)
            return first(last(x))[:, :5]

    return run.train(Again, vectors())


# -- ranks that take different branches ------------------------------------------------------------------------------


@case(fast=True)
def branch_chosen_by_local_data(run: Surroundings) -> Result:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor, route: Tensor) -> Tensor:
            if bool((route == route[0]).all()):
                x = self.left(x) if bool(route[0] == 0) else self.right(x)
            else:
                x = torch.where((route == 0).unsqueeze(1), self.left(x), self.right(x))
            return self.out(torch.relu(x))

    routes = ([0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1])
    batches = [{**vectors(), "route": torch.tensor(r)} for r in routes]
    return run.train(Routed, batches, lambda m, b: F.mse_loss(m(b["x"], b["route"]), b["y"]), steps=4)


class Expert(nn.Sequential):
    """An expert with a forward of its own, which Dynamo compiles by itself where the frame around it breaks."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x + super().forward(x)


class Mixture(nn.Module):
    """Each sample goes to one expert; with few samples a rank, most experts idle on some rank. Experts are units."""

    def __init__(self, make: Any = lambda: layers(6, 8, 6)) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleList(make() for _ in range(4))
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            mine = (chosen == k).nonzero().squeeze(1)
            if mine.numel() > 0:
                y = y.index_add(0, mine, self.apply_expert(expert, x[mine]) * weight[mine].unsqueeze(1))
        return self.out(y)

    def apply_expert(self, expert: nn.Module, x: Tensor) -> Tensor:
        return expert(x)


@case(fast=True)
def experts_idle_on_some_ranks(run: Surroundings) -> Result:
    return run.train(Mixture, vectors(), steps=4)


@case()
def experts_compiled_one_by_one(run: Surroundings) -> Result:
    return run.train(lambda: Mixture(Expert), vectors(), steps=4)


@case()
def experts_recomputed_in_backward(run: Surroundings) -> Result:
    class Recomputed(Mixture):
        def apply_expert(self, expert: nn.Module, x: Tensor) -> Tensor:
            return checkpoint(expert, x, use_reentrant=False)

    return run.train(Recomputed, vectors(), steps=4)


@case()
def experts_in_one_stacked_parameter(run: Surroundings) -> Result:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(6, 3, bias=False)
            self.up, self.down = nn.Parameter(torch.randn(3, 6, 8) * 0.3), nn.Parameter(torch.randn(3, 8, 5) * 0.3)

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.gate(x).softmax(-1).max(-1)
            each = torch.einsum("beh,eho->beo", torch.relu(torch.einsum("bd,edh->beh", x, self.up)), self.down)
            return (each * (F.one_hot(chosen, 3) * weight.unsqueeze(1)).unsqueeze(-1)).sum(1)

    return run.train(Stacked, vectors())


# -- where the compiler stops ----------------------------------------------------------------------------------------


@case(fast=True)
def graph_break_between_two_uses(run: Surroundings) -> Result:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.out = nn.Linear(6, 6), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.twice(x))
            torch._dynamo.graph_break()
            return self.out(torch.tanh(self.twice(x)))

    return run.train(Broken, vectors())


@case()
def layer_kept_from_the_compiler(run: Surroundings) -> Result:
    class Kept(nn.Linear):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Kept(8, 8), nn.ReLU(), nn.Linear(8, 5))

    return run.train(build, vectors())


@case()
def more_variants_than_dynamo_keeps(run: Surroundings) -> Result:
    class Varying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.variant = layers(6, 9, 5), 0

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * (1.0 + 0.01 * self.variant)

    def step(training: Training, batch: Batch) -> Tensor:
        training.model.variant = training.number
        return plain_step(training, batch)

    return run.train(Varying, vectors(), step=step, steps=12)


@case()
def blocks_compiled_one_by_one(run: Surroundings) -> Result:
    """More blocks than Dynamo keeps variants of one function."""

    def compile_blocks(model: Any) -> None:
        if run.form in OPTIONS:
            for block in model.blocks:
                block.compile(backend="fxshard", options=OPTIONS[run.form], fullgraph=True)

    class Uncompiled(Tower):
        forward = torch.compiler.disable(Tower.forward, recursive=False)

    return run.train(lambda: Uncompiled(depth=10), vectors(), before=compile_blocks, steps=2)


@case()
def fullgraph_and_dynamic_shapes(run: Surroundings) -> Result:
    batches = [sentences(8, 6), sentences(8, 9, seed=2)]
    return run.train(lambda: Decoder(tied=True), batches, next_token, fullgraph=True, dynamic=True)


@case()
def sentences_that_grow(run: Surroundings) -> Result:
    batches = [sentences(8, n, seed=n) for n in (4, 5, 6, 8, 11)]
    return run.train(lambda: Decoder(tied=True), batches, next_token, steps=5)


@case()
def sentences_trimmed_by_each_rank(run: Surroundings) -> Result:
    class Trimming(Decoder):
        def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
            tokens = tokens[:, : int(lengths.max())]
            logits = super().forward(tokens[:, :-1])
            each = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
            keep = torch.arange(1, tokens.shape[1]) < lengths.unsqueeze(1)
            return ((each * keep).sum(1) / (lengths - 1)).mean()

    lengths = ([9, 8, 5, 5, 7, 3, 4, 4], [3, 3, 9, 6, 5, 5, 8, 8], [9, 4, 6, 6, 3, 3, 5, 7])
    batches = [{**sentences(8, 9), "lengths": torch.tensor(n)} for n in lengths]
    return run.train(lambda: Trimming(tied=True), batches, lambda m, b: m(b["tokens"], b["lengths"]))


# -- gradients of gradients ------------------------------------------------------------------------------------------


@case(refusal="double backward|create_graph")
def gradient_penalty(run: Surroundings) -> Result:
    def step(training: Training, batch: Batch) -> Tensor:
        training.optimizer.zero_grad()
        x = batch["x"].clone().requires_grad_(True)
        out = training.call(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.mse_loss(out, batch["y"]) + 0.3 * (grad.norm(dim=1) - 1).pow(2).mean()
        loss.backward()
        training.optimizer.step()
        return loss

    return run.train(lambda: nn.Sequential(nn.Linear(6, 8), Block(8), nn.Linear(8, 5)), vectors(), step=step)


@case(refusal="double backward")
def forces_as_gradients_of_an_energy(run: Surroundings) -> Result:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = layers(6, 9, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    return run.train(Forces, vectors(outputs=6))
