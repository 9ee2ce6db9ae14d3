"""The training loop of a spec, run plainly on the whole batch or sharded on a part of it, and everything it computes.

Losses are means over samples, so gradients averaged over ranks are those of the whole batch. Where a layer looks at the
batch as a whole, every rank gets the whole batch.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fuzz_layers import WIDTH
from fuzz_model import Tree, build, shard
from fuzz_spec import BATCH_DEPENDENT, Spec
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

BATCH, LENGTH = 8, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "fx": {"codegen": "eager", "check_order": "error"},
    "inductor": {"check_order": "error"},
}
Result = dict[str, Tensor | None]


class Plain:
    """One process with the whole batch: eager, or compiled by one of torch's backends."""

    def __init__(self, spec: Spec, backend: str = "") -> None:
        self.spec, self.backend = spec, backend

    def prepare(self, model: nn.Module) -> None:
        """Shard the model."""

    def callable(self, model: nn.Module) -> Callable[..., Tensor]:
        """What runs the forward of the model."""
        return torch.compile(model, backend=self.backend) if self.backend else model

    def part(self, whole: Tensor) -> Tensor:
        """This rank's samples."""
        return whole

    def mean(self, value: Tensor) -> Tensor:
        """The mean over ranks."""
        return value.detach().clone()

    def synchronise(self, model: Any, value: bool) -> None:
        """Whether backward reduces gradients."""


class Sharded(Plain):
    """One rank of the default process group. ``form``: eager (not compiled), fx, inductor."""

    def __init__(self, spec: Spec, form: str) -> None:
        super().__init__(spec)
        self.form, self.rank, self.world = form, dist.get_rank(), dist.get_world_size()
        self.whole = any(layer.kind in BATCH_DEPENDENT for layer in spec.layers)
        self.mesh = self._mesh()

    def _mesh(self) -> DeviceMesh:
        if self.spec.replicate and self.world >= 4:
            return init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("replicate", "shard"))
        return init_device_mesh("cpu", (self.world,), mesh_dim_names=("shard",))

    def prepare(self, model: nn.Module) -> None:
        shard(model, self.spec, self.mesh)

    def callable(self, model: nn.Module) -> Callable[..., Tensor]:
        if self.form == "eager":
            return model
        if not self.spec.compile_blocks or not isinstance(model, Tree):
            return torch.compile(model, backend="fxshard", options=OPTIONS[self.form])
        for part in model.listed():
            part.compile(backend="fxshard", options=OPTIONS[self.form])
        return model

    def part(self, whole: Tensor) -> Tensor:
        size = BATCH // self.world
        return whole if self.whole else whole[self.rank * size : (self.rank + 1) * size]

    def mean(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.world

    def synchronise(self, model: Any, value: bool) -> None:
        model.set_requires_gradient_sync(value)


def train(spec: Spec, around: Plain) -> Result:
    """Every loss, gradient and norm of a training by name, and the parameters, buffers and optimizer state it ends
    with; collective where ``around`` is sharded."""
    return _Run(spec, around).train()


class _Run:
    def __init__(self, spec: Spec, around: Plain) -> None:
        self.spec, self.around, self.how = spec, around, spec.training
        self.result: Result = {}
        self.start(spec.seed)

    def start(self, seed: int) -> None:
        self.model = build(self.spec, seed)
        self.around.prepare(self.model)
        self.ready()

    def ready(self) -> None:
        """Compile the model and build its optimizer."""
        self.call = self.around.callable(self.model)
        self.optimizer = _optimizer(self.how.optimizer, self.model)

    def train(self) -> Result:
        first = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        for step in range(self.how.steps):
            if step == self.how.copy_at:
                self.copy()
            if step == self.how.resume_at:
                self.resume()
            if step == self.how.rewind_at:
                self.model.load_state_dict(first)
            self.step(step)
        self.record("", self.model.state_dict())
        for name, p in self.model.named_parameters():
            state = self.optimizer.state.get(p, {})
            self.record(f"state of {name}: ", {k: v for k, v in state.items() if isinstance(v, Tensor)})
        return self.result

    def record(self, prefix: str, tensors: dict[str, Any]) -> None:
        self.result |= {prefix + name: _full(t) for name, t in tensors.items()}

    # -- events ---------------------------------------------------------------------------------------------------

    def copy(self) -> None:
        original, state = self.model, self.optimizer.state_dict()
        self.model = copy.deepcopy(original)
        self.ready()
        self.optimizer.load_state_dict(copy.deepcopy(state))
        with torch.no_grad():
            for p in original.parameters():
                p.zero_()  # the copy has values of its own

    def resume(self) -> None:
        model = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        self.start(self.spec.seed + 1)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self, step: int) -> None:
        how, model = self.how, self.model
        for module in model.modules():
            if isinstance(module, Tree):
                module.now = step
        if how.toggle:
            for p in list(model.parameters())[::3]:
                p.requires_grad_(step % 2 == 0)
        if how.validate:
            self.validate(step)
        self.optimizer.zero_grad(set_to_none=not how.keep_grads)
        losses = []
        for i in range(how.micro_batches):
            if how.sync_last:
                self.around.synchronise(model, i == how.micro_batches - 1)
            losses += self.forwards_and_backwards(step, i)
        self.result[f"loss of step {step}"] = self.around.mean(torch.stack(losses))
        if how.clip:
            self.result[f"norm of step {step}"] = _full(nn.utils.clip_grad_norm_(model.parameters(), how.clip))
        self.record(f"gradient of step {step} of ", {k: p.grad for k, p in model.named_parameters()})
        self.optimizer.step()

    def forwards_and_backwards(self, step: int, number: int) -> list[Tensor]:
        forwards = self.how.forwards
        losses = [self.loss(step, 2 * number + i) for i in range(1 if forwards == "one" else 2)]
        ends = [sum(losses)] if forwards == "summed" else losses[::-1] if forwards == "reversed" else losses
        for end in ends:
            if isinstance(end, Tensor) and end.requires_grad:  # not where all is frozen
                (end / self.how.micro_batches).backward()
        return [loss.detach() for loss in losses]

    def loss(self, step: int, number: int) -> Tensor:
        inputs, wanted = self.batch(step, number)
        return F.mse_loss(self.call(*inputs), wanted)

    def validate(self, step: int) -> None:
        off = torch.inference_mode() if self.how.validate == "inference_mode" else torch.no_grad()
        self.model.eval()
        with off:
            value = self.loss(step, 100)
            self.result[f"validation before step {step}"] = self.around.mean(value)
        self.model.train()

    def batch(self, step: int, number: int) -> tuple[tuple[Any, ...], Tensor]:
        g = torch.Generator().manual_seed(1000 * self.spec.seed + 10 * step + number)
        shape = (BATCH, LENGTH + (step if self.how.grow else 0), WIDTH)
        dtype = getattr(torch, self.spec.dtype)
        x, y = (torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
        ids = torch.randint(0, 100, shape[:2], generator=g)
        flag = torch.tensor(1.0 if (step + number) % 3 else -1.0)
        x = self.around.part(x)
        reentrant = any(block.run == "checkpoint_reentrant" for block in self.spec.blocks)
        return (x.requires_grad_(reentrant), self.around.part(ids), step, flag), self.around.part(y)


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Steps of these are smooth in the gradient, with an ``eps`` well above the rounding noise of one that is zero."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)
    return torch.optim.Adagrad(model.parameters(), lr=0.02, eps=1e-3, initial_accumulator_value=1e-4)


def _full(value: Any) -> Tensor | None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if value is None:
            return None
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
