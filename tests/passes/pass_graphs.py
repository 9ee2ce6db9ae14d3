"""Small graphs of per-parameter collectives, made by hand, and their text.

`Sketch` has one call a node; `text` says what a graph does, one short line a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fxshard
from fxshard.bucket import ParamBucket
from fxshard.facts import GATHER, GATHER_PART, KEEP_PART, REDUCE, Buckets, read_graph
from fxshard.passes import bucket_all_gather, bucket_reduce_scatter, pipeline, schedule_overlap
from fxshard.passes.lower_layout import PACK, VIEW
from fxshard.passes.rewrite import MARK, call
from fxshard.passes.schedule_overlap import LAUNCHES, WAIT
from fxshard.plan import Plan, make_plan
from fxshard.registry import lookup

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
"""Gathers in bf16, reduces in fp32."""


def param(*shape: int, dtype: torch.dtype = torch.float32, frozen: bool = False) -> nn.Parameter:
    values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    return nn.Parameter(values, requires_grad=not frozen)


def sharded(
    mesh: DeviceMesh | None = None,
    *,
    reshard: bool | int = True,
    policy: MixedPrecisionPolicy | None = None,
    cut: Callable[[nn.Parameter], Any] | None = None,
    **units: Sequence[nn.Parameter],
) -> dict[str, ParamBucket]:
    """The buckets, by name, of one unit for each argument: `sharded(a=[param(4, 4)], b=[...])`."""
    root = nn.Module()
    for name, params in units.items():
        unit = nn.Module()
        for i, p in enumerate(params):
            unit.register_parameter(f"p{i}", p)
        root.add_module(name, unit)
    options = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy(), "shard_placement_fn": cut}
    for unit in root.children():
        fxshard.fully_shard(unit, reshard_after_forward=reshard, **options)  # type: ignore[arg-type]
    fxshard.fully_shard(root, reshard_after_forward=reshard, **options)  # type: ignore[arg-type]
    return {b.name: b for unit in root.children() for b in unit._fxshard_unit.buckets}  # type: ignore[union-attr]


class Sketch:
    """A graph in the making. Inputs are the buckets' flat shards, in order, then what `inputs` names with its shape.

    An aten op is a method: `g.mm(x, w)`. Values are fake, so that shapes and dtypes are checked.
    """

    def __init__(self, buckets: dict[str, ParamBucket], **inputs: tuple[int, ...] | torch.Tensor) -> None:
        self.buckets, self.graph, self._mode = buckets, fx.Graph(), FakeTensorMode()
        self._flats = {name: self._placeholder(f"flat_{i}", b.flat) for i, (name, b) in enumerate(buckets.items())}
        for name, like in inputs.items():
            value = like if isinstance(like, torch.Tensor) else torch.empty(like)
            setattr(self, name, self._placeholder(name, value))

    def _placeholder(self, name: str, like: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self._mode.from_tensor(like.detach())
        return node

    def gather(self, bucket: str, index: int) -> fx.Node:
        return call(self.graph, GATHER, self._flats[bucket], self.buckets[bucket].key, index)

    def keep_part(self, bucket: str, ranks: int) -> fx.Node:
        return call(self.graph, KEEP_PART, self._flats[bucket], self.buckets[bucket].key, ranks)

    def gather_part(self, part: fx.Node, bucket: str, index: int, ranks: int) -> fx.Node:
        return call(self.graph, GATHER_PART, part, self.buckets[bucket].key, index, ranks)

    def reduce(self, grad: fx.Node, bucket: str, index: int) -> fx.Node:
        return call(self.graph, REDUCE, grad, self.buckets[bucket].key, index)

    def __getattr__(self, name: str) -> Callable[..., fx.Node]:
        packet = getattr(torch.ops.aten, name)
        overload = getattr(packet, next(o for o in ("Tensor", "default", "int") if o in packet.overloads()))
        return lambda *args, **kwargs: call(self.graph, overload, *args, **kwargs)

    def output(self, *values: fx.Node) -> fx.GraphModule:
        self.graph.output(values)
        self.graph.lint()
        return fx.GraphModule(nn.Module(), self.graph)


def forward(buckets: dict[str, ParamBucket]) -> fx.GraphModule:
    """A chain of layers: `x = mm(x, w)` for the first parameter (square) of each bucket."""
    g = Sketch(buckets, x=(4, 4))
    x = g.x
    for name in buckets:
        x = g.mm(x, g.gather(name, 0))
    return g.output(x)


def backward(buckets: dict[str, ParamBucket]) -> fx.GraphModule:
    """The chain's backward, last bucket first; `x` stands for every layer's saved input."""
    g = Sketch(buckets, x=(4, 4), grad=(4, 4))
    grad, grads = g.grad, []
    for name in reversed(buckets):
        weight_grad = g.mm(g.permute(g.x, [1, 0]), grad)
        grad = g.mm(grad, g.permute(g.gather(name, 0), [1, 0]))
        grads.append(g.reduce(weight_grad, name, 0))
    return g.output(grad, *grads)


def planned(
    gm: fx.GraphModule, kind: str = "forward", prefetch: int = 1, in_flight: int = 1
) -> tuple[Plan, Buckets]:
    buckets = Buckets.of([gm.graph])
    return make_plan(read_graph(gm.graph, kind, buckets), prefetch=prefetch, in_flight=in_flight), buckets


def scheduled(gm: fx.GraphModule, kind: str = "forward", prefetch: int = 1) -> fx.GraphModule:
    """The graph after every pass but the last one."""
    plan, buckets = planned(gm, kind, prefetch)
    bucket_all_gather.run(gm, plan, buckets)
    bucket_reduce_scatter.run(gm, plan, buckets)
    schedule_overlap.run(gm, plan)
    gm.graph.lint()
    return gm


def finished(
    gm: fx.GraphModule, kind: str = "forward", prefetch: int = 1, in_flight: int = 1
) -> tuple[fx.GraphModule, Plan]:
    """The graph after all passes, verified after each."""
    plan, buckets = planned(gm, kind, prefetch, in_flight)
    return pipeline.rewrite(gm, plan, buckets), plan


def text(gm: fx.GraphModule, *, only: Sequence[str] = ()) -> list[str]:
    """What the graph calls, in order, with the bucket's name where there is one; `only` keeps lines by first word."""
    lines = [_line(n) for n in gm.graph.nodes if n.op == "call_function"]
    return [line for line in lines if not only or line.split()[0] in only]


def _line(node: fx.Node) -> str:
    if node.target in LAUNCHES:
        return f"{LAUNCHES[node.target]} {node.meta[MARK]}"
    if node.target is WAIT:
        return f"wait {node.args[0].meta[MARK]}"  # type: ignore[union-attr]
    if node.target is KEEP_PART:
        return f"keep_part {lookup(node.args[1]).name}"  # type: ignore[arg-type]
    named = {GATHER: "gather", GATHER_PART: "gather_part", REDUCE: "reduce", VIEW: "view", PACK: "pack"}
    for target, said in named.items():
        if node.target is target:
            return f"{said} {lookup(node.args[1]).name} {node.args[2]}"  # type: ignore[arg-type]
    return node.target._schema.name.split("::")[1]  # type: ignore[union-attr]


def run(gm: fx.GraphModule, *inputs: torch.Tensor) -> Any:
    gm.recompile()
    return gm(*inputs)
