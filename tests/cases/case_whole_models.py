"""Whole models as their libraries build them, tiny and from a configuration alone; and trainings of several models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from case_harness import (
    Batch,
    Block,
    Decoder,
    Result,
    Surroundings,
    Training,
    case,
    full,
    next_token,
    plain_step,
    sentences,
    sgd,
    vectors,
)
from torch import Tensor, nn

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 23}


def loss_of_its_own(model: Any, batch: Batch) -> Tensor:
    """The loss that models of transformers compute from labels."""
    return model(input_ids=batch["tokens"], labels=batch["tokens"]).loss


def language_model(run: Surroundings, name: str, **config: Any) -> Result:
    """A model of transformers by the name of its family; keys of attention have biases whose gradient is zero."""
    import transformers

    known = getattr(transformers, f"{name}Config")(**{**SIZES, "pad_token_id": 0, **config})
    head = "ForMaskedLM" if name == "Bert" else "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    build: Callable[[], nn.Module] = lambda: getattr(transformers, name + head)(known).train()  # noqa: E731
    return run.train(build, sentences(vocab=23), loss_of_its_own, optimizer=sgd)


@case(needs="transformers")
def llama(run: Surroundings) -> Result:
    return language_model(run, "Llama", intermediate_size=24, num_key_value_heads=2)


@case(needs="transformers")
def llama_with_a_tied_head(run: Surroundings) -> Result:
    return language_model(run, "Llama", intermediate_size=24, num_key_value_heads=2, tie_word_embeddings=True)


@case(needs="transformers")
def gpt2(run: Surroundings) -> Result:
    return language_model(run, "GPT2", n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


@case(needs="transformers")
def mixtral(run: Surroundings) -> Result:
    """Each rank sends its tokens to experts of its own."""
    return language_model(run, "Mixtral", intermediate_size=24, num_key_value_heads=2, num_local_experts=4)


@case(needs="transformers")
def bert(run: Surroundings) -> Result:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return language_model(run, "Bert", intermediate_size=24, max_position_embeddings=16, **no_dropout)


def pictures(size: int) -> Batch:
    g = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, 3, size, size, generator=g), "y": torch.randint(0, 5, (8,), generator=g)}


def classes(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


@case(needs="torchvision", averaged=True)
def resnet(run: Surroundings) -> Result:
    """Batch norm looks at the samples of its rank. In fp64, since over so few it multiplies rounding errors."""
    from torchvision.models.resnet import BasicBlock, ResNet

    build: Callable[[], nn.Module] = lambda: ResNet(BasicBlock, [2, 1, 1, 1], num_classes=5).double()  # noqa: E731
    batch = pictures(32)
    return run.train(build, {**batch, "x": batch["x"].double()}, classes, optimizer=sgd)


@case(needs="torchvision")
def vision_transformer(run: Surroundings) -> Result:
    from torchvision.models.vision_transformer import VisionTransformer

    build: Callable[[], nn.Module] = lambda: VisionTransformer(8, 4, 2, 2, 16, 24, num_classes=5)  # noqa: E731
    return run.train(build, pictures(8), classes, optimizer=sgd)


# -- several models --------------------------------------------------------------------------------------------------


@case()
def adversaries_in_turn(run: Surroundings) -> Result:
    """The generator learns through the discriminator, whose own gradients from that are thrown away."""

    def part(inputs: int, outputs: int) -> Training:
        model = nn.Sequential(nn.Linear(inputs, 8), Block(8), Block(8), nn.Linear(8, outputs))
        run.shard(model)
        training = Training(run, model, run.compile(model), next_token)
        training.optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9))
        return training

    torch.manual_seed(7)
    maker, judge = part(6, 5), part(5, 1)
    batch = run.part(vectors())
    result: Result = {}
    for i in range(3):
        judge.optimizer.zero_grad()
        made = maker.call(batch["x"]).detach()
        loss = F.softplus(-judge.call(batch["y"])).mean() + F.softplus(judge.call(made)).mean()
        loss.backward()
        judge.optimizer.step()
        result[f"loss of the judge {i}"] = run.mean(loss)
        maker.optimizer.zero_grad()
        loss = F.softplus(-judge.call(maker.call(batch["x"]))).mean()
        loss.backward()
        maker.optimizer.step()
        result[f"loss of the maker {i}"] = run.mean(loss)
    states = {"maker": run.state(maker.model), "judge": run.state(judge.model)}
    return {**result, **{f"{who} {name}": value for who, state in states.items() for name, value in state.items()}}


@case()
def moving_average_of_the_weights(run: Surroundings) -> Result:
    """torch's own, which copies the model deeply and is then evaluated."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    torch.manual_seed(7)
    model = Decoder()
    run.shard(model)
    training = Training(run, model, run.compile(model), next_token)
    training.optimizer = sgd(model.parameters())
    average: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    batch = run.part(sentences())
    for _ in range(3):
        plain_step(training, batch)
        average.update_parameters(model)
    with torch.no_grad():
        loss = run.mean(next_token(average, batch))
    return {"loss of the average": loss, **{k: full(v) for k, v in average.state_dict().items()}}
