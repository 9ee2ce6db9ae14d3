"""The canonical form of a scheduled graph: launches, waits, and compute between them.

Own stable names, no node names, addresses or ranks: the same text on every rank. Golden files, dumps and the command
line share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxshard.passes.rewrite import MARK
from fxshard.passes.schedule_overlap import LAUNCHES, WAIT
from fxshard.passes.verify import aliases
from fxshard.plan import BucketFacts, Collective, Plan

_SHORT = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "complex64": "c64"}
_WITHOUT_COLLECTIVE: dict[Any, tuple[str, str]] = {
    torch.ops.fxshard.concat.default: ("keep", "accumulate"),
    torch.ops.fxshard.add_waiting_.default: ("add", "waiting"),
    torch.ops.fxshard.take_part.default: ("keep", "part"),
}
_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "mv", "dot", "linear"}


@dataclass(frozen=True)
class Step:
    """One line of a schedule. ``what`` is launch, wait, compute, add (gradients that waited for this reduction) or keep
    (gradients that are not reduced; part of a gathered buffer); ``kernels`` counts what a compute step runs."""

    what: str
    op: str = ""
    bucket: str = ""
    units: tuple[str, ...] = ()
    kernels: tuple[tuple[str, int], ...] = ()


def steps_of(graph: fx.Graph, plan: Plan) -> list[Step]:
    """Launches and waits of the plan's collectives in graph order, and what is computed between them."""
    units = _units_read(graph, plan)
    steps: list[Step] = []
    kernels: Counter[str] = Counter()
    read: dict[str, None] = {}

    def flush() -> None:
        if kernels:
            steps.append(Step("compute", units=tuple(read), kernels=tuple(kernels.items())))
        kernels.clear()
        read.clear()

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if MARK in node.meta:
            if node.target not in LAUNCHES and node.target is not WAIT and node.target not in _WITHOUT_COLLECTIVE:
                continue  # the cast before, the division after: part of the collective
            flush()
            if node.target in _WITHOUT_COLLECTIVE:
                steps.append(Step(*_WITHOUT_COLLECTIVE[node.target], node.meta[MARK]))
                continue
            launch = node if node.target in LAUNCHES else node.args[0]
            what = "launch" if node is launch else "wait"
            steps.append(Step(what, LAUNCHES[launch.target], node.meta[MARK]))
        elif (kind := kernel_kind(node)) is not None:
            kernels[kind] += 1
            read.update(dict.fromkeys(units.get(node, ())))
    flush()
    return steps


def hidden_launches(steps: Sequence[Step]) -> tuple[int, int]:
    """(launches that have compute before their wait, all launches)."""
    pending: dict[tuple[str, str], bool] = {}
    hidden = total = 0
    for step in steps:
        if step.what == "launch":
            pending[step.op, step.bucket] = False
            total += 1
        elif step.what == "wait":
            hidden += pending.pop((step.op, step.bucket))
        else:
            pending = dict.fromkeys(pending, True)
    return hidden, total


def kernel_kind(node: fx.Node) -> str | None:
    """A short name for what a node computes; None for views, constants and bookkeeping."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = node.target._schema.name.split("::")[1]
    if node.target.is_view or name in ("_unsafe_view", "reshape", "full", "empty", "iota", "detach"):
        return None
    if name in _MATMULS:
        return "mm"
    if "scaled_dot_product" in name:
        return "sdpa"
    if "convolution" in name:
        return "conv"
    if "embedding" in name or name in ("index", "index_put", "gather", "scatter"):
        return "index"
    if name in ("cat", "concat"):
        return "pack"
    if torch.Tag.pointwise in node.target.tags or name in ("convert_element_type", "where", "clone", "copy"):
        return "pointwise"
    if torch.Tag.reduction in node.target.tags or name in ("sum", "mean", "var_mean", "amax", "native_layer_norm"):
        return "reduce"
    return name


def _units_read(graph: fx.Graph, plan: Plan) -> dict[fx.Node, list[str]]:
    """Which units' full parameters a node reads."""
    units: dict[fx.Node, list[str]] = {}
    for node in graph.nodes:
        if LAUNCHES.get(node.target) == "all_gather" and MARK in node.meta:
            unit = plan.bucket(node.meta[MARK]).unit
            for alias in aliases(node):
                for user in alias.users:
                    units.setdefault(user, []).append(unit)
    return units


def schedule_text(title: str, graphs: Sequence[tuple[Plan, Sequence[Step]]]) -> str:
    """The schedule of one or more graphs as text, under a title line."""
    lines = [f"# {title}"]
    for plan, steps in graphs:
        lines += ["", plan.kind, *_lines(steps, plan)]
    return "\n".join(lines) + "\n"


def _lines(steps: Sequence[Step], plan: Plan) -> list[str]:
    out, time = [], 0
    collectives = {(c.op, c.bucket): c for c in (*plan.gathers, *plan.reductions)}
    width = max((len(c.bucket) for c in collectives.values()), default=0)
    for step in steps:
        if step.what == "compute":
            kernels = " ".join(f"{k}×{n}" for k, n in step.kernels)
            out.append(f"  --  compute  {' '.join(step.units) or '-':<{max(width, 14)}}  {kernels}")
            continue
        time += step.what == "wait"
        line = f"  t{time:<2} {step.what:<7} {step.op:<14} {step.bucket:<{width}}"
        if step.what in ("launch", "keep") and step.op != "part":
            line += f"  {_moves(collectives[step.op, step.bucket], plan.bucket(step.bucket))}"
        out.append(line.rstrip())
    return out


def _moves(collective: Collective, bucket: BucketFacts) -> str:
    """Shapes before and after, per rank: 8 × f32[887808] → f32[7102464]."""
    if collective.op == "all_gather":
        dtype, n = short(bucket.gather), collective.ranks
        said = f"{n} × {dtype}[{bucket.size // n}] → {dtype}[{bucket.size}]"
        if n < bucket.shard_size:
            return f"{said}  group part"
        return f"{said}  group shard{_cast(bucket.storage, bucket.gather)}"
    dtype = short(bucket.reduce)
    if collective.op == "accumulate":
        return f"{dtype}[{bucket.size}] not reduced{_cast(bucket.gather, bucket.reduce)}"
    if collective.op == "reduce_scatter":
        said = f"{dtype}[{bucket.size}] → {bucket.shard_size} × {dtype}[{bucket.segment}]"
        return f"{said}  group reduce{_cast(bucket.gather, bucket.reduce)}"
    return f"{dtype}[{bucket.segment}] over {bucket.replicate_size}  group replicate"


def _cast(before: str, after: str) -> str:
    return "" if before == after else f"  cast {short(before)} → {short(after)}"


def short(dtype: str) -> str:
    """``float32`` as ``f32``."""
    return _SHORT.get(dtype, dtype)


