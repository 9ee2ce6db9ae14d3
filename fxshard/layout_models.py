"""Parameter shapes of well-known models, one bucket a unit, and how much of its buffer each layout wastes on them.

Shapes are those of the published checkpoints, weights as (out, in), in registration order. A unit is what one call of
``fully_shard`` would gather: a block, an embedding, a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fxshard.layout import GlobalLayout
from fxshard.layout_planner import plan_compact, split_by_row_family, waste_reason

Shapes = dict[str, tuple[int, ...]]
"""Full shape by parameter name, in registration order."""


def _layer_norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, out: int, into: int) -> Shapes:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def _pre_norm_block(width: int) -> Shapes:
    """GPT-2 and ViT: fused query, key and value, an MLP four times as wide, biases everywhere."""
    return {
        **_linear("attn.qkv", 3 * width, width),
        **_linear("attn.out", width, width),
        **_linear("mlp.up", 4 * width, width),
        **_linear("mlp.down", width, 4 * width),
        **_layer_norm("norm1", width),
        **_layer_norm("norm2", width),
    }


def _gated_mlp(name: str, width: int, inner: int) -> Shapes:
    return {
        f"{name}.gate_proj": (inner, width),
        f"{name}.up_proj": (inner, width),
        f"{name}.down_proj": (width, inner),
    }


def _llama(width: int, key_value: int, inner: int, vocabulary: int, *, bias: bool = False) -> dict[str, Shapes]:
    """Llama and Qwen2.5 (whose query, key and value have biases); embedding and head are not tied."""
    block: Shapes = {}
    for name, out in (("q_proj", width), ("k_proj", key_value), ("v_proj", key_value)):
        block |= _linear(name, out, width) if bias else {f"{name}.weight": (out, width)}
    block |= {"o_proj.weight": (width, width), **_gated_mlp("mlp", width, inner)}
    block |= {"input_norm": (width,), "post_attention_norm": (width,)}
    return {"block": block, "embedding": {"embed": (vocabulary, width)}, "head": _head(width, vocabulary)}


def _head(width: int, vocabulary: int) -> Shapes:
    return {"norm": (width,), "lm_head": (vocabulary, width)}


def _deepseek_v3() -> dict[str, Shapes]:
    """Multi-head latent attention; 256 routed experts and a shared one, separate tensors as in the checkpoint."""
    width, heads, query_rank, key_value_rank = 7168, 128, 1536, 512
    attention: Shapes = {
        "q_a_proj": (query_rank, width),
        "q_a_norm": (query_rank,),
        "q_b_proj": (heads * (128 + 64), query_rank),
        "kv_a_proj": (key_value_rank + 64, width),
        "kv_a_norm": (key_value_rank,),
        "kv_b_proj": (heads * (128 + 128), key_value_rank),
        "o_proj": (width, heads * 128),
        "input_norm": (width,),
        "post_attention_norm": (width,),
    }
    experts: Shapes = {"router": (256, width), "router_bias": (256,)}
    for expert in range(256):
        experts |= _gated_mlp(f"experts.{expert}", width, 2048)
    return {
        "dense block": attention | _gated_mlp("mlp", width, 18432),
        "expert block": attention | experts | _gated_mlp("shared_expert", width, 2048),
        "embedding": {"embed": (129280, width)},
        "head": _head(width, 129280),
    }


def _resnet50() -> dict[str, Shapes]:
    """The stem, the first and second bottleneck of each stage, and the classifier; torchvision's names."""

    def conv_and_norm(conv: str, norm: str, out: int, into: int, kernel: int) -> Shapes:
        return {f"{conv}.weight": (out, into, kernel, kernel), **_layer_norm(norm, out)}

    units = {"stem": conv_and_norm("conv1", "bn1", 64, 3, 7)}
    into = 64
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        for block in (0, 1):
            units[f"layer{stage}.{block}"] = {
                **conv_and_norm("conv1", "bn1", width, into, 1),
                **conv_and_norm("conv2", "bn2", width, width, 3),
                **conv_and_norm("conv3", "bn3", 4 * width, width, 1),
                **(conv_and_norm("downsample.0", "downsample.1", 4 * width, into, 1) if block == 0 else {}),
            }
            into = 4 * width
    return units | {"head": _linear("fc", 1000, 2048)}


def _vit_b16() -> dict[str, Shapes]:
    return {
        "embedding": {
            "class_token": (1, 1, 768),
            "conv_proj.weight": (768, 3, 16, 16),
            "conv_proj.bias": (768,),
            "pos_embedding": (1, 197, 768),
        },
        "block": _pre_norm_block(768),
        "head": {**_layer_norm("norm", 768), **_linear("head", 1000, 768)},
    }


MODELS: Mapping[str, dict[str, Shapes]] = {
    "GPT-2": {
        "block": _pre_norm_block(768),
        "embedding": {"wte": (50257, 768), "wpe": (1024, 768)},
        "head": _layer_norm("ln_f", 768),  # the head's weight is the embedding's
    },
    "Llama-2-7B": _llama(4096, 4096, 11008, 32000),
    "Llama-3-8B": _llama(4096, 1024, 14336, 128256),
    "Llama-3-70B": _llama(8192, 1024, 28672, 128256),
    "Qwen2.5-7B": _llama(3584, 512, 18944, 152064, bias=True),
    "DeepSeek-V3": _deepseek_v3(),
    "ResNet-50": _resnet50(),
    "ViT-B/16": _vit_b16(),
}
"""Units by model, shapes by unit."""


@dataclass(frozen=True, slots=True)
class WasteRow:
    """Waste (buffer elements / used elements - 1) of one unit over one number of shards."""

    model: str
    unit: str
    ranks: int
    block_size: int
    """Rows that stay together."""
    used: int
    """Elements of all tensors."""
    documented: float | None
    """``GlobalLayout.build_for_row_atomic``; None if it refuses, see ``note``."""
    compact: float
    """``plan_compact``, one bucket."""
    split: float
    """``plan_compact`` after ``split_by_row_family``."""
    buckets: int
    """Buckets of the split."""
    note: str
    reason: str
    """Why ``split`` exceeds the waste bound, of the bucket that wastes most; empty where it does not."""
    """Which tensors the documented builder refuses, and are cut between single rows by ours; empty if none."""


def waste_table(
    models: Iterable[str] = tuple(MODELS),
    ranks: Sequence[int] = (8, 64, 512, 1024),
    block_sizes: Sequence[int] = (1, 32, 128),
    *,
    align: int = 32,
    waste_bound: float = 0.02,
) -> list[WasteRow]:
    """Compare the documented builder with the compact planner: one row per unit, block size and number of shards.

    A tensor whose dim 0 is not a multiple of the block size is planned in blocks of one row; the documented builder
    refuses its unit. ``align`` is in elements (32 are 128 bytes of fp32), ``waste_bound`` is what
    ``split_by_row_family`` tries to meet. ``ValueError`` for an unknown model.
    """
    rows = []
    for model in models:
        if model not in MODELS:
            raise ValueError(f"unknown model {model!r}: choose from {', '.join(MODELS)}")
        for unit, shapes in MODELS[model].items():
            for block_size in block_sizes:
                for dp_size in ranks:
                    rows.append(_waste_row(model, unit, shapes, dp_size, block_size, align, waste_bound))
    return rows


def _waste_row(
    model: str, unit: str, named: Shapes, dp_size: int, block_size: int, align: int, waste_bound: float
) -> WasteRow:
    shapes = list(named.values())
    uneven = [name for name, shape in named.items() if shape[0] % block_size]
    blocks = [1 if name in uneven else block_size for name in named]
    documented = None if uneven else GlobalLayout.build_for_row_atomic(shapes, dp_size, block_size=block_size).waste
    whole = plan_compact(shapes, dp_size, block_sizes=blocks, align=align)
    buckets = split_by_row_family(shapes, dp_size, block_sizes=blocks, align=align, waste_bound=waste_bound)
    split = [
        plan_compact([shapes[i] for i in ids], dp_size, block_sizes=[blocks[i] for i in ids], align=align)
        for ids in buckets
    ]
    waste = sum(layout.size for layout in split) / whole.used - 1
    worst = max(range(len(split)), key=lambda k: split[k].size - split[k].used)
    reason = None
    if waste > waste_bound:
        names, ids = list(named), buckets[worst]
        reason = waste_reason(
            [shapes[i] for i in ids],
            dp_size,
            block_sizes=[blocks[i] for i in ids],
            waste_bound=waste_bound,
            names=[names[i] for i in ids],
        )
    note = f"refused: dim 0 is not a multiple of {block_size} in {', '.join(uneven)}; cut by row" if uneven else ""
    ours = (whole.waste, waste, len(buckets))
    return WasteRow(model, unit, dp_size, block_size, whole.used, documented, *ours, note, reason or "")
