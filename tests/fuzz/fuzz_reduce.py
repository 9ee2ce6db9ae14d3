"""Make a failing spec smaller: drop parts and turn features off, one at a time, while it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from fuzz_spec import Block, Layer, Spec, Training


def reduced(spec: Spec, fails: Callable[[Spec], bool]) -> Spec:
    """A spec that fails and of which no simpler variant does."""
    while True:
        simpler = next((s for s in _simpler(spec) if fails(s)), None)
        if simpler is None:
            return spec
        spec = simpler


def _simpler(spec: Spec) -> Iterator[Spec]:
    for root in _simpler_block(spec.root):
        yield replace(spec, root=root)
    for training in _towards(spec.training, Training()):
        yield replace(spec, training=training)
    if spec.training.steps > 1:
        yield replace(spec, training=replace(spec.training, steps=spec.training.steps - 1))
    yield from _towards(spec, replace(Spec(spec.seed, spec.root), training=spec.training, units=spec.units))
    if spec.units != "root":
        yield replace(spec, units="root")


def _simpler_block(block: Block) -> Iterator[Block]:
    for i, child in enumerate(block.children):
        rest = block.children[:i], block.children[i + 1 :]
        if len(block.children) > 1:
            yield replace(block, children=rest[0] + rest[1])
        if isinstance(child, Block):
            yield replace(block, children=rest[0] + child.children + rest[1])
    yield from _towards(block, Block(block.children))
    for i, child in enumerate(block.children):
        rest = block.children[:i], block.children[i + 1 :]
        inner: Iterator[Any]
        inner = _simpler_block(child) if isinstance(child, Block) else _towards(child, Layer(child.number))
        for simpler in inner:
            yield replace(block, children=(*rest[0], simpler, *rest[1]))


def _towards(value: Any, plain: Any) -> Iterator[Any]:
    """``value`` with one field as ``plain`` has it, for each that differs."""
    for f in fields(value):
        if f.name != "steps" and getattr(value, f.name) != getattr(plain, f.name):
            yield replace(value, **{f.name: getattr(plain, f.name)})
