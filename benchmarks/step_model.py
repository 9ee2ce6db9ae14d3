"""The benchmark's model: a small Llama (RMSNorm, rotary positions, SwiGLU, no biases, head not tied)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """``heads`` divides ``width`` into an even number; ``hidden`` is the width inside the MLP."""

    layers: int = 6
    width: int = 256
    hidden: int = 704
    heads: int = 4
    vocabulary: int = 512


class Block(nn.Module):
    """Attention and a gated MLP, each on its normalised input and added to it. (batch, tokens, width)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.RMSNorm(size.width, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(size.width, size.width, bias=False) for _ in range(4))
        self.norm2 = nn.RMSNorm(size.width, eps=1e-5)
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (linear(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """int64 (batch, tokens) to fp32 logits (batch, tokens, vocabulary)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-5)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = angles(tokens.shape[1], self.head_width, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def angles(tokens: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary positions, (tokens, width / 2) each: position / 10000^(2 i / width)."""
    rates = 10000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    turned = torch.arange(tokens, device=device)[:, None] * rates
    return turned.cos(), turned.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` (..., tokens, width) with its halves turned as the real and imaginary parts of complex numbers."""
    real, imaginary = x.chunk(2, dim=-1)
    return torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)
