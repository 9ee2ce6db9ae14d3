"""Dtypes, shapes and strides of parameters; buffers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from case_harness import Batch, Result, Surroundings, case, layers, sgd, vectors
from torch import Tensor, nn
from torch.distributed.tensor import Shard


class Mixed(nn.Module):
    """A parameter of every kind that one model may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.fp32 = nn.Parameter(torch.randn(6, 6) * 0.3)
        self.fp16 = nn.Parameter((torch.randn(6, 6) * 0.3).half())
        self.bf16 = nn.Parameter((torch.randn(6, 6) * 0.3).bfloat16())
        self.fp64 = nn.Parameter(torch.randn(6, 6).double() * 0.3)
        self.c64 = nn.Parameter(torch.randn(5, 6, dtype=torch.cfloat) * 0.3)
        self.order = nn.Parameter(torch.randperm(6), requires_grad=False)
        self.keep = nn.Parameter(torch.tensor([True, False] * 3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.fp32)[:, self.order] * self.keep
        x = torch.tanh(x @ self.fp16.float()) + torch.tanh(x @ self.bf16.float())
        z = (x.double() @ self.fp64).to(torch.cfloat) @ self.c64.conj().t()
        return z.real + z.imag


@case(fast=True, tolerance=3e-3)
def parameters_of_many_dtypes(run: Surroundings) -> Result:
    def trainable(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in params if p.requires_grad], lr=0.05)

    return run.train(Mixed, vectors(), optimizer=trainable)


@case()
def int8_base_with_adapter(run: Surroundings) -> Result:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randint(-100, 100, (5, 6), dtype=torch.int8), requires_grad=False)
            self.scale = nn.Parameter(torch.full((5, 1), 0.01), requires_grad=False)
            self.adapter = nn.Parameter(torch.randn(5, 6) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.codes.to(x.dtype) * self.scale + self.adapter)

    return run.train(Quantised, vectors())


@case(tolerance=3e-2)
def autocast_to_bfloat16(run: Surroundings) -> Result:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(model(batch["x"]).float(), batch["y"])

    return run.train(lambda: layers(6, 16, 16, 5), vectors(), loss, optimizer=sgd)


@case()
def sparse_embedding_gradient(run: Surroundings) -> Result:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(11, 6, sparse=True), nn.Linear(6, 5)

        def forward(self, words: Tensor) -> Tensor:
            return self.out(self.embed(words).mean(1))

    batch = {"words": torch.arange(32).remainder(11).view(8, 4), "y": vectors()["y"]}
    plain = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    return run.train(Bag, batch, lambda m, b: F.mse_loss(m(b["words"]), b["y"]), optimizer=plain)


@case()
def parameters_with_strides(run: Surroundings) -> Result:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transposed = nn.Parameter((torch.randn(6, 9) * 0.3).t())
            self.skipping = nn.Parameter((torch.randn(5, 18) * 0.3)[:, ::2])

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.transposed.t()) @ self.skipping.t()

    return run.train(Strided, vectors())


@case()
def more_ranks_than_rows(run: Surroundings) -> Result:
    class Few(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(6, 3, 5)
            self.two, self.one = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1, 7))
            self.three, self.none = nn.Parameter(torch.ones(3, 1)), nn.Parameter(torch.ones(0, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * self.two.sum() + self.one.mean() + self.three.prod() + self.none.sum()

    return run.train(Few, vectors())


@case()
def parameters_of_no_elements(run: Surroundings) -> Result:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.no_rows, self.no_columns = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(2, 0))
            self.out = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x) * (1 + self.no_rows.sum() + self.no_columns.sum())

    return run.train(Empty, vectors(), shard=lambda m: run.shard(m, shard_placement_fn=lambda p: Shard(p.ndim - 1)))


@case()
def rows_that_divide_by_no_rank(run: Surroundings) -> Result:
    return run.train(lambda: layers(6, 7, 11, 13, 5), vectors())


@case()
def a_hundred_tiny_parameters(run: Surroundings) -> Result:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(nn.Parameter(torch.randn(1 + k % 6) * 0.1) for k in range(100))
            self.out = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            for scale in self.scales:
                x = x + torch.tanh(x) * scale.mean()
            return self.out(x)

    return run.train(Tiny, vectors(), steps=2)


def images() -> Batch:
    g = torch.Generator().manual_seed(2)
    return {"x": torch.randn(8, 3, 6, 6, generator=g), "y": torch.randn(8, 5, generator=g)}


class Convolutions(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        make = (lambda: nn.GroupNorm(2, 6)) if norm is nn.GroupNorm else (lambda: norm(6))
        self.first, self.norm_1 = nn.Conv2d(3, 6, 3, padding=1), make()
        self.second, self.norm_2 = nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=3), make()
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm_1(self.first(x)))
        x = torch.relu(self.norm_2(self.second(x)))
        return self.out(x.mean((2, 3)))


@case(averaged=True)
def batch_norm_keeps_the_statistics_of_its_rank(run: Surroundings) -> Result:
    # SGD: a bias before a batch norm has a true gradient of zero, and Adam would make full steps of its rounding noise.
    return run.train(lambda: Convolutions(nn.BatchNorm2d), images(), optimizer=sgd)


@case()
def convolutions_with_group_norm(run: Surroundings) -> Result:
    return run.train(lambda: Convolutions(nn.GroupNorm), images())


@case(fast=True)
def buffers_that_forward_changes(run: Surroundings) -> Result:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(6, 9, 5)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("decay", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.decay.mul_(0.9)
            return self.net(x) * self.decay + self.calls

    return run.train(Counting, vectors(), steps=4)


@case()
def buffers_outside_the_state_dict(run: Surroundings) -> Result:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(6, 9, 5)
            self.register_buffer("positions", torch.linspace(0, 1, 6), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x + self.positions)

    return run.train(Positions, vectors())
