"""Train a model sharded on every rank of a pool, and plainly in one process, and compare everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import GPT2, ConvNet, Llama, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard

STEPS = 3
BATCH = 8


def images(seed: int) -> Tensor:
    return torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def labels(seed: int, classes: int) -> Tensor:
    return torch.randint(0, classes, (BATCH,), generator=torch.Generator().manual_seed(seed))


def next_token_loss(logits: Tensor, inputs: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), inputs.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2(width=24, blocks=2, heads=3),
    "llama": lambda: Llama(width=24, blocks=2, heads=6, kv_heads=3, hidden=40),
    "conv": lambda: ConvNet(width=8, blocks=2, classes=7),
    "tied": lambda: GPT2(width=24, blocks=2, heads=3, tied=True),
}


def batch(model: str, step: int) -> tuple[Tensor, Callable[[Tensor, slice], Tensor]]:
    """Inputs of the whole batch, and the mean loss of a slice of it."""
    if model == "conv":
        target = labels(step, 7)
        return images(step), lambda out, part: F.cross_entropy(out.float(), target[part])
    inputs = tokens(BATCH, 12, seed=step)
    return inputs, lambda out, part: next_token_loss(out, inputs[part])


@dataclass
class Trained:
    losses: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)

    def compare(self, other: Trained, tolerance: float = 1e-5) -> None:
        """Every tensor within ``tolerance`` of the largest entry of ``self``'s; None exactly where it is None."""
        for step, (a, b) in enumerate(zip(self.losses, other.losses, strict=True)):
            _close(f"loss {step}", a, b, tolerance)
        for step, (want, got) in enumerate(zip(self.grads, other.grads, strict=True)):
            _close_all(f"gradient of step {step}", want, got, tolerance)
        _close_all("parameter", self.params, other.params, tolerance)
        _close_all("optimizer state", self.state, other.state, tolerance)


def _close_all(what: str, want: Any, got: Any, tolerance: float) -> None:
    assert want.keys() == got.keys(), f"{what}: {sorted(want.keys() ^ got.keys())}"
    for name, a in want.items():
        b = got[name]
        assert (a is None) == (b is None), f"{what} {name}: {a is None=} {b is None=}"
        if a is not None:
            _close(f"{what} {name}", a, b, tolerance)


def _close(what: str, want: Tensor, got: Tensor, tolerance: float) -> None:
    assert want.shape == got.shape and want.dtype == got.dtype, f"{what}: {want.shape} {got.shape}"
    if want.numel():
        off = (want.double() - got.double()).abs().max() / want.double().abs().max().clamp_min(1e-6)
        assert off <= tolerance, f"{what} is off by {off:.2e} of its largest entry"


def compiled(model: nn.Module, form: str) -> Callable[..., Any]:
    """``form``: eager, aot_eager or inductor (stock backends), fx or fx-unfused or fx-inductor (ours); fx-waiting has
    every wait at its launch, fx-all-reduces fuses those alone."""
    if form == "eager":
        return model
    if form in ("aot_eager", "inductor"):
        return torch.compile(model, backend=form, fullgraph=True)
    codegen = "inductor" if form == "fx-inductor" else "eager"
    fuse = "all-reduces" if form == "fx-all-reduces" else form != "fx-unfused"
    options: dict[str, Any] = {"codegen": codegen, "fuse": fuse}
    options |= {"prefetch": 0, "in_flight": 0} if form == "fx-waiting" else {}
    return torch.compile(model, backend="fxshard", fullgraph=True, options={**options, "check_order": "error"})


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW where every gradient is a real one. The key bias of GPT-2's attention has a true gradient of zero, and Adam
    would make a step of full size of its rounding noise."""
    if name in ("gpt2", "tied"):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def full(t: Any) -> Tensor | None:
    return None if t is None else (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": full(value)
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }


def train_plainly(name: str, bf16: int = 0) -> Trained:
    """One process, whole batch. ``bf16`` ranks: parameters cast to bf16 by hand, a slice of the batch at a time, and
    the slices' gradients summed in fp32 and divided: what bf16 gathers with fp32 reduction should compute."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = optimizer_of(name, model)
    out = Trained()
    for step in range(STEPS):
        inputs, loss_of = batch(name, step)
        optimizer.zero_grad()
        if not bf16:
            loss = loss_of(model(inputs), slice(None))
            loss.backward()
            out.losses.append(loss.detach())
        else:
            out.losses.append(torch.zeros(()))
            for r in range(bf16):
                part = slice(r * BATCH // bf16, (r + 1) * BATCH // bf16)
                cast = {k: p.detach().bfloat16().requires_grad_() for k, p in model.named_parameters()}
                x = inputs[part].bfloat16() if inputs.is_floating_point() else inputs[part]
                loss = loss_of(torch.func.functional_call(model, cast, x), part)
                grads = torch.autograd.grad(loss, list(cast.values()))
                for p, g in zip(model.parameters(), grads, strict=True):
                    p.grad = g.float() / bf16 + (0 if p.grad is None else p.grad)
                out.losses[-1] += loss.detach() / bf16
        out.grads.append({k: full(p.grad) for k, p in model.named_parameters()})
        optimizer.step()
    out.params = {k: full(p) for k, p in model.named_parameters()}
    out.state = _optimizer_state(model, optimizer)
    return out


def train_sharded(name: str, form: str, reshard: bool = True, bf16: bool = False, mesh_shape: Any = None) -> Trained:
    """On every rank: each takes its slice of the batch; losses are averaged; everything comes back in full."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    shape = mesh_shape or (world,)
    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    model = fxshard.shard(MODELS[name](), mesh, reshard_after_forward=reshard, mp_policy=policy)
    optimizer = optimizer_of(name, model)
    step_fn = compiled(model, form)
    out = Trained()
    part = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    for step in range(STEPS):
        inputs, loss_of = batch(name, step)
        optimizer.zero_grad()
        loss = loss_of(step_fn(inputs[part]), part)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        out.losses.append(mean / world)
        out.grads.append({k: full(p.grad) for k, p in model.named_parameters()})
        optimizer.step()
    out.params = {k: full(p) for k, p in model.named_parameters()}
    out.state = _optimizer_state(model, optimizer)
    return out
