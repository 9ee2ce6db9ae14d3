"""What modules do beside calling their children: references, parametrizations, replaced forwards, unusual calls."""

from __future__ import annotations

import copy
import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from case_harness import (
    Batch,
    Decoder,
    Result,
    Surroundings,
    Training,
    case,
    layers,
    plain_step,
    sentences,
    sgd,
    vectors,
)
from torch import Tensor, nn

import fxshard

# -- references to parameters ----------------------------------------------------------------------------------------


@case()
def recurrent_layers(run: Surroundings) -> Result:
    """``nn.LSTM`` keeps a list of its weights."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 5, num_layers=2, bidirectional=True, batch_first=True)
            self.gru, self.cell = nn.GRU(10, 4, batch_first=True), nn.GRUCell(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            self.lstm.flatten_parameters()
            x = self.gru(self.lstm(x.view(-1, 2, 3))[0])[0]
            return self.cell(x[:, 1], self.cell(x[:, 0]))

    return run.train(Recurrent, vectors())


@case()
def lists_and_dicts_of_parameters(run: Surroundings) -> Result:
    class Referring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)
            self.matrices = [self.first.weight, (self.last.weight,)]
            self.named = {"bias": self.last.bias}
            self.listed = nn.ParameterList(nn.Parameter(torch.randn(6)) for _ in range(2))
            self.keyed = nn.ParameterDict({"scale": nn.Parameter(torch.ones(5))})

        def forward(self, x: Tensor) -> Tensor:
            for scale in self.listed:
                x = x * scale
            x = torch.tanh(x @ self.matrices[0].t()) @ self.matrices[1][0].t()
            return (x + self.named["bias"]) * self.keyed["scale"]

    return run.train(Referring, vectors())


@case()
def weight_of_a_module_used_by_another(run: Surroundings) -> Result:
    """``nn.MultiheadAttention`` reads the weight of a child that it never calls; so does the model itself."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(3, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.never_called = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.project(x.view(-1, 2, 3))
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return F.linear(x.mean(1), self.never_called.weight, self.never_called.bias)

    # SGD: the bias of attention's keys has a true gradient of zero.
    return run.train(Attending, vectors(), optimizer=sgd)


@case()
def fast_path_of_transformer_encoders(run: Surroundings) -> Result:
    """In evaluation ``nn.TransformerEncoder`` takes all weights of its layers by itself."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.project, self.out = nn.Linear(3, 8), nn.Linear(8, 5)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.encoder(self.project(x.view(-1, 2, 3))).mean(1))

    def step(training: Training, batch: Batch) -> Tensor:
        training.call.eval()
        with torch.no_grad():
            before = training.loss(training.call, batch)
        training.call.train()
        return plain_step(training, batch) + before

    return run.train(Encoder, vectors(), step=step, optimizer=sgd)


@case()
def parameters_listed_inside_forward(run: Surroundings) -> Result:
    """Modules ask ``parameters()`` for a dtype, and keep a slow copy of another module up to date."""

    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fast = layers(6, 9, 5)
            self.slow = copy.deepcopy(self.fast).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x = x.to(next(self.parameters()).dtype)
            with torch.no_grad():
                before = self.slow(x)
                for fast, slow in zip(self.fast.parameters(), self.slow.parameters(), strict=True):
                    if slow.dim() > 1:
                        slow.lerp_(fast, 0.3)
                    else:
                        slow.data = slow.data * 0.7 + fast.data * 0.3
                after = self.slow(x)
            return self.fast(x) - after + before

    return run.train(Momentum, vectors())


# -- weights computed from parameters --------------------------------------------------------------------------------

PARAMETRIZED = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
}


@case()
def parametrized_weights(run: Surroundings) -> Result:
    results: Result = {}
    for name, wrap in PARAMETRIZED.items():

        def build(wrap: Any = wrap) -> nn.Module:
            return nn.Sequential(wrap(nn.Linear(6, 9)), nn.Tanh(), wrap(nn.Linear(9, 5)))

        results.update({f"{name} {k}": v for k, v in run.train(build, vectors(), optimizer=sgd, steps=2).items()})
    return results


@case()
def weights_computed_in_hooks_before_forward(run: Surroundings) -> Result:
    def build() -> nn.Module:
        model = layers(6, 9, 8, 5)
        nn.utils.weight_norm(model[0])
        nn.utils.spectral_norm(model[2])
        nn.utils.prune.l1_unstructured(model[4], "weight", amount=0.3)
        return model

    return run.train(build, vectors(), optimizer=sgd)


# -- forwards --------------------------------------------------------------------------------------------------------


def patch(model: Any) -> None:
    """Replace forwards on instances: around the old one, by a new one, and as a bound method."""
    first, old, whole = model[0], model[0].forward, model.forward.__func__
    first.forward = lambda x: old(x) * 2
    model[2].forward = types.MethodType(lambda self, x: F.linear(x, self.weight, self.bias) + 1, model[2])
    model.forward = types.MethodType(lambda self, x: whole(self, x) * 1.5, model)


@case()
def forward_replaced_before_sharding(run: Surroundings) -> Result:
    def build() -> nn.Module:
        model = layers(6, 9, 5)
        patch(model)
        return model

    return run.train(build, vectors())


@case(fast=True)
def forward_replaced_after_sharding(run: Surroundings) -> Result:
    return run.train(lambda: layers(6, 9, 5), vectors(), before=patch)


@case()
def method_that_users_call_like_forward(run: Surroundings) -> Result:
    class Encoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Parameter(torch.randn(5, 8) * 0.3)

        def encode(self, x: Tensor) -> Tensor:
            return torch.tanh(self.first(x)) @ self.last.t()

        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x)

    def loss(model: Any, batch: Batch) -> Tensor:
        return F.mse_loss(model.encode(batch["x"]), batch["y"]) + F.mse_loss(model(batch["x"]), batch["y"])

    return run.train(Encoding, vectors(), loss, before=lambda m: fxshard.register_forward_method(m, "encode"))


@case()
def submodules_called_by_the_user(run: Surroundings) -> Result:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = layers(6, 9, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(torch.relu(self.encoder(x)))

    def step(training: Training, batch: Batch) -> Tensor:
        loss = plain_step(training, batch)
        with torch.no_grad():
            encoded = training.model.encoder(batch["x"])
            return loss + training.model.decoder(torch.relu(encoded)).pow(2).mean()

    return run.train(Pair, vectors(), step=step)


@case()
def hooks_on_modules(run: Surroundings) -> Result:
    def hook(model: Any) -> None:
        for layer in model:
            layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
            layer.register_full_backward_hook(lambda module, before, after: None)
        model.register_forward_hook(lambda module, args, out: out + 0.1)

    return run.train(lambda: layers(6, 9, 5), vectors(), before=hook)


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


@case()
def loss_inside_forward_and_a_dataclass_out(run: Surroundings) -> Result:
    class WithLoss(Decoder):
        def forward(self, tokens: Tensor, labels: Tensor | None = None, **unused: Any) -> Output:  # type: ignore[override]
            logits = super().forward(tokens)
            assert labels is not None
            return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)

    def loss(model: Any, batch: Batch) -> Tensor:
        return model(tokens=batch["tokens"], labels=batch["tokens"], use_cache=False).loss

    return run.train(lambda: WithLoss(tied=True), sentences(), loss)


# -- values ----------------------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """x @ w.T with twice the gradient for w, computed from saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return grad @ w, 2 * grad.t() @ x


@case()
def custom_function_that_saves_the_weight(run: Surroundings) -> Result:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.out = nn.Parameter(torch.randn(9, 6) * 0.3), nn.Linear(9, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.relu(Doubled.apply(x, self.w)))

    return run.train(Custom, vectors())


@case()
def output_that_is_a_view_changed_in_place(run: Surroundings) -> Result:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (1, 6))) for _ in range(2))
            self.out = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.inner:
                y = layer(torch.tanh(x)).squeeze(1)
                y += x
                x = y
            return self.out(x)

    return run.train(Viewing, vectors())


@case()
def inputs_that_overlap(run: Surroundings) -> Result:
    class Shifted(Decoder):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
            return F.cross_entropy(super().forward(tokens).transpose(1, 2), targets)

    batch = sentences(8, 9)
    return run.train(lambda: Shifted(tied=True), batch, lambda m, b: m(b["tokens"][:, :-1], b["tokens"][:, 1:]))
