"""What a random model and its training are: data, all of it drawn from one integer seed.

``random_spec(seed)`` draws a tree of layers, how its parts become units, and a training loop. ``Spec.describe()`` is
what a report of a failure shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

KINDS = (
    *("linear", "linear", "mlp", "mlp", "embedding", "embedding_bag", "layer_norm", "rms_norm", "group_norm"),
    *("batch_norm", "conv1d", "conv2d", "conv_transpose", "attention", "encoder", "lstm", "gru", "bilinear", "prelu"),
    *("list", "dict", "odd", "odd", "transposed", "stacked", "weight_norm", "unused"),
)
RUNS = (
    *("chain", "chain", "chain", "residual", "residual", "twice", "by_step", "by_step_argument", "by_flag"),
    *("in_turn", "checkpoint", "checkpoint_reentrant"),
)
BATCH_DEPENDENT = ("batch_norm",)


@dataclass(frozen=True)
class Layer:
    """``number`` is its own; ``tie``: its first parameter of a shape that an earlier layer has is that layer's;
    ``share``: it is the earlier layer's module itself (0: neither; numbers start at 1)."""

    number: int
    kind: str = "linear"
    size: int = 3  # hidden width, rows or experts, by kind
    bias: bool = True
    dtype: str = ""  # "": the model's
    frozen: str = "nothing"  # nothing, first (parameter), all
    tie: int = 0
    share: int = 0


@dataclass(frozen=True)
class Block:
    """``run``: how its children are called; ``unit``: is sharded as a unit of its own, where units are by block."""

    children: tuple[Layer | Block, ...]
    run: str = "chain"
    container: str = "list"  # list, sequential, attributes, dict
    unit: bool = False
    reshard: bool | None = None


@dataclass(frozen=True)
class Training:
    """A training loop. Numbers of steps are counted from 0; -1 is never."""

    steps: int = 4
    optimizer: str = "sgd"  # sgd, adamw, adagrad
    micro_batches: int = 1
    sync_last: bool = False  # gradients of all but the last micro-batch wait
    forwards: str = "one"  # one, summed (two forwards, one backward), pairs and reversed (two backwards)
    clip: float = 0.0
    keep_grads: bool = False  # zero_grad(set_to_none=False)
    toggle: bool = False  # every third parameter is frozen in odd steps
    validate: str = ""  # "", no_grad, inference_mode: a forward in eval mode before each step
    copy_at: int = -1  # goes on with a deep copy
    resume_at: int = -1  # goes on with a new model and optimizer that load the state dicts
    rewind_at: int = -1  # loads the state dict from before the first step
    grow: bool = False  # inputs get longer


@dataclass(frozen=True)
class Spec:
    seed: int
    root: Block
    training: Training = field(default_factory=Training)
    dtype: str = "float32"
    units: str = "auto"  # auto, blocks, root, lists (pairs of neighbours as one unit each)
    reshard: bool = True
    placements: bool = False  # parameters are cut along other dims, in blocks, or not at all
    replicate: bool = False  # a (2, ranks / 2) mesh
    pairs: bool = False  # where more than two ranks shard, what reshards does so to pairs of them
    compile_blocks: bool = False  # each child of the root is compiled by itself

    @property
    def layers(self) -> list[Layer]:
        return list(_layers(self.root))

    @property
    def blocks(self) -> list[Block]:
        return list(_blocks(self.root))

    def describe(self) -> str:
        """A tree of the model and what differs from the defaults of the rest."""
        rest = [_differences(self, ("seed", "root", "training")), _differences(self.training)]
        return "\n".join([f"seed {self.seed}: " + " ".join(filter(None, rest)), *_lines(self.root, 1)])


def _layers(block: Block) -> Iterator[Layer]:
    for child in block.children:
        yield from [child] if isinstance(child, Layer) else _layers(child)


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for child in block.children:
        if isinstance(child, Block):
            yield from _blocks(child)


def _differences(value: object, without: tuple[str, ...] = ()) -> str:
    shown = []
    for f in fields(value):  # type: ignore[arg-type]
        if f.name not in without and (now := getattr(value, f.name)) != f.default:
            shown.append(f"{f.name}={now}")
    return " ".join(shown)


def _lines(block: Block, depth: int) -> Iterator[str]:
    yield "  " * depth + f"{block.run} {_differences(block, ('children', 'run'))}".rstrip()
    for child in block.children:
        if isinstance(child, Block):
            yield from _lines(child, depth + 1)
        else:
            yield "  " * (depth + 1) + f"{child.kind} {_differences(child, ('kind',))}"


def random_spec(seed: int) -> Spec:
    """The spec of a seed. With bf16 layers the optimizer is SGD: others divide by gradients, so by rounding errors."""
    rng = random.Random(seed)
    numbers = iter(range(1, 1000))
    known: list[int] = []
    mixed = rng.random() < 0.25  # whether layers may have dtypes of their own

    def layer() -> Layer:
        number = next(numbers)
        like = rng.choice(known) if known and rng.random() < 0.2 else 0
        share = like if rng.random() < 0.3 else 0
        known.append(number)
        return Layer(
            number=number,
            kind=rng.choice(KINDS),
            size=rng.choice([1, 2, 3, 5, 8]),
            bias=rng.random() < 0.7,
            dtype=rng.choice(["", "", "bfloat16", "float64"]) if mixed else "",
            frozen=rng.choice(["nothing"] * 6 + ["first", "all"]),
            tie=0 if share else like,
            share=share,
        )

    def block(depth: int) -> Block:
        children: list[Layer | Block] = [
            block(depth + 1) if depth < 2 and rng.random() < 0.4 else layer() for _ in range(rng.choice([1, 2, 2, 3]))
        ]
        return Block(
            tuple(children),
            run=rng.choice(RUNS),
            container=rng.choice(["list", "list", "sequential", "attributes", "dict"]),
            unit=rng.random() < 0.6,
            reshard=rng.choice([None, True, True, False]),
        )

    root, training = block(0), _random_training(rng)
    if training.sync_last:
        root = _always_trained(root, next(numbers))
    if any(known.dtype == "bfloat16" for known in _layers(root)):
        training = replace(training, optimizer="sgd")
    return Spec(
        seed=seed,
        root=root,
        training=training,
        dtype=rng.choice(["float32"] * 4 + ["float64"]),
        units=rng.choice(["auto", "blocks", "blocks", "root", "lists"]),
        reshard=rng.random() < 0.7,
        placements=rng.random() < 0.25,
        replicate=rng.random() < 0.4,
        compile_blocks=rng.random() < 0.25,
        pairs=rng.random() < 0.4,
    )


def compilable(spec: Spec) -> Spec:
    """``spec`` with group norm for batch norm in what is recomputed: eager code updates running statistics in forward
    and again when it recomputes, code compiled by any backend of torch 2.13 once."""
    return replace(spec, root=_compilable(spec.root, recomputed=False))


def _compilable(block: Block, recomputed: bool) -> Block:
    recomputed |= block.run.startswith("checkpoint")
    children: list[Layer | Block] = []
    for child in block.children:
        if isinstance(child, Block):
            children.append(_compilable(child, recomputed))
        else:
            kind = "group_norm" if child.kind == "batch_norm" else child.kind
            children.append(replace(child, kind=kind, share=0) if recomputed else child)
    return replace(block, children=tuple(children))


def _always_trained(root: Block, number: int) -> Block:
    """``root`` with a last layer that every step trains: gradients that wait are reduced by a backward, so the last
    micro-batch of a step must have one."""
    run = root.run if not root.run.startswith("by_") and root.run != "in_turn" else "chain"
    return replace(root, children=(*root.children, Layer(number)), run=run)


def _random_training(rng: random.Random) -> Training:
    event = rng.choice(["", "", "", "copy_at", "resume_at", "rewind_at"])
    return Training(
        optimizer=rng.choice(["sgd", "adamw", "adagrad"]),
        micro_batches=rng.choice([1, 1, 2, 3]),
        sync_last=rng.random() < 0.6,
        forwards=rng.choice(["one"] * 4 + ["summed", "pairs", "reversed"]),
        clip=rng.choice([0.0, 0.0, 0.05]),
        keep_grads=rng.random() < 0.2,
        toggle=rng.random() < 0.2,
        validate=rng.choice(["", "", "", "no_grad", "inference_mode"]),
        grow=rng.random() < 0.15,
        **({event: rng.choice([1, 2])} if event else {}),  # type: ignore[arg-type]
    )
