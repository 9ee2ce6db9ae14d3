"""The layers of random models: from (batch, time, ``WIDTH``) and word ids (batch, time) to the same shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fuzz_spec import Layer
from torch import Tensor, nn

WIDTH = 6
EPS = 0.1  # of norms: with torch's own they multiply rounding errors of nearly constant values
ODD_SHAPES = ((1,), (0, 3), (2, 1, 5), (WIDTH,), (1, WIDTH), (3, 2), (7, 1), (1, 1, 1, 4), (2, 0), (5,))
Call = Callable[[Any, Tensor, Tensor], Tensor]


class Odd(nn.Module):
    """Parameters of shapes that divide badly: one element, no rows, fewer rows than ranks."""

    def __init__(self, number: int) -> None:
        super().__init__()
        for i in range(3):
            shape = ODD_SHAPES[(number + i) % len(ODD_SHAPES)]
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape) * 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * (1 + self.p0.sum()) + self.p1.sum() - self.p2.square().sum())


class Transposed(nn.Module):
    """The weight of a linear layer, applied from the other side."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Stacked(nn.Module):
    """Matrices of experts in one parameter, of which each word uses one."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) * 0.4)
        self.bias = nn.Parameter(torch.zeros(experts, WIDTH))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        chosen = ids % self.experts.shape[0]
        return torch.einsum("btw,btwv->btv", x, self.experts[chosen]) + self.bias[chosen]


class Unused(nn.Module):
    """Parameters that no forward uses, beside one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 2)
        self.spare = nn.Parameter(torch.ones(4))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def _matrices(kind: type[nn.Module], size: int) -> nn.Module:
    made = [nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4) for _ in range(1 + size % 3)]
    return kind(made) if kind is nn.ParameterList else kind({f"m{i}": m for i, m in enumerate(made)})


def _through(matrices: Any, x: Tensor) -> Tensor:
    for matrix in matrices:
        x = torch.tanh(x @ matrix)
    return x


def _across_time(module: Any, x: Tensor) -> Tensor:
    return module(x.transpose(1, 2)).transpose(1, 2)


def _make(layer: Layer) -> tuple[nn.Module, Call]:
    """The module of a layer, with every parameter as torch initialises it, and how it is called."""
    w, n, bias = WIDTH, layer.size, layer.bias
    plain: Call = lambda m, x, ids: m(x)  # noqa: E731
    made: dict[str, Callable[[], tuple[nn.Module, Call]]] = {
        "linear": lambda: (nn.Linear(w, w, bias), plain),
        "mlp": lambda: (nn.Sequential(nn.Linear(w, n, bias), nn.GELU(), nn.Linear(n, w)), plain),
        "embedding": lambda: (nn.Embedding(n, w), lambda m, x, ids: x + m(ids % n)),
        "embedding_bag": lambda: (nn.EmbeddingBag(n, w), lambda m, x, ids: x + m(ids % n).unsqueeze(1)),
        "layer_norm": lambda: (nn.LayerNorm(w, EPS, bias=bias), plain),
        "rms_norm": lambda: (nn.RMSNorm(w, EPS), plain),
        "group_norm": lambda: (nn.GroupNorm(2, w, EPS), lambda m, x, ids: _across_time(m, x)),
        "batch_norm": lambda: (nn.BatchNorm1d(w, EPS), lambda m, x, ids: _across_time(m, x)),
        "conv1d": lambda: (
            nn.Conv1d(w, w, 3, padding=1, groups=1 + n % 3, bias=bias),
            lambda m, x, ids: _across_time(m, x),
        ),
        "conv2d": lambda: (
            nn.Conv2d(1, n, 3, padding=1, bias=bias),
            lambda m, x, ids: x + torch.tanh(m(x.unsqueeze(1))).mean(1),
        ),
        "conv_transpose": lambda: (nn.ConvTranspose1d(w, w, 1, bias=bias), lambda m, x, ids: _across_time(m, x)),
        "attention": lambda: (
            nn.MultiheadAttention(w, 1 + n % 3, bias=bias, batch_first=True),
            lambda m, x, ids: m(x, x, x, need_weights=False)[0],
        ),
        "encoder": lambda: (
            nn.TransformerEncoderLayer(w, 2, n, 0.0, F.gelu, batch_first=True, norm_first=bias),
            plain,
        ),
        "lstm": lambda: (nn.LSTM(w, w, 1 + n % 2, bias, batch_first=True), lambda m, x, ids: m(x)[0]),
        "gru": lambda: (
            nn.GRU(w, w // 2, 1, bias, batch_first=True, bidirectional=True),
            lambda m, x, ids: m(x)[0],
        ),
        "bilinear": lambda: (nn.Bilinear(w, w, w, bias), lambda m, x, ids: torch.tanh(m(x, x))),
        "prelu": lambda: (nn.PReLU(w if bias else 1), lambda m, x, ids: _across_time(m, x)),
        "list": lambda: (_matrices(nn.ParameterList, n), lambda m, x, ids: _through(m, x)),
        "dict": lambda: (_matrices(nn.ParameterDict, n), lambda m, x, ids: _through(m.values(), x)),
        "odd": lambda: (Odd(layer.number + n), plain),
        "transposed": lambda: (Transposed(), plain),
        "stacked": lambda: (Stacked(n), lambda m, x, ids: m(x, ids)),
        "weight_norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(w, w, bias)), plain),
        "unused": lambda: (Unused(), plain),
    }
    return made[layer.kind]()


class Adapted(nn.Module):
    """A layer that computes in a dtype of its own, called as all layers are."""

    def __init__(self, layer: Layer, dtype: torch.dtype) -> None:
        super().__init__()
        module, self.call = _make(layer)
        self.dtype = dtype
        self.module = module.to(dtype)

    def forward(self, x: Tensor, ids: Tensor, step: int, flag: Tensor) -> Tensor:
        return self.call(self.module, x.to(self.dtype), ids).to(x.dtype)
