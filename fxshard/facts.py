"""What a captured graph says of communication: the bridge from torch.fx to plans, which know no graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxshard import ops  # noqa: F401  defines the ops named below
from fxshard.bucket import ParamBucket
from fxshard.plan import BucketFacts, GatherFact, GraphFacts, ReduceFact
from fxshard.reduction import Stage, as_stage
from fxshard.registry import lookup

GATHER = torch.ops.fxshard.gather_param.default
KEEP_PART = torch.ops.fxshard.keep_part.default
GATHER_PART = torch.ops.fxshard.gather_part.default
REDUCE = torch.ops.fxshard.reduce_grad.default
ADD = torch.ops.aten.add.Tensor
ADD_WAITING = torch.ops.fxshard.add_waiting.default


@dataclass(frozen=True)
class Buckets:
    """The buckets of one graph, by the names that its plan uses. Equal names of different models get a number."""

    by_name: dict[str, ParamBucket]

    @staticmethod
    def of(graphs: Sequence[fx.Graph]) -> Buckets:
        by_name: dict[str, ParamBucket] = {}
        for node in nodes_of(graphs, (GATHER, GATHER_PART, REDUCE)):
            bucket = lookup(key_of(node))
            if bucket in by_name.values():
                continue
            name, k = bucket.name, 2
            while name in by_name:
                name, k = f"{bucket.name}@{k}", k + 1
            by_name[name] = bucket
        return Buckets(by_name)

    def name(self, key: str) -> str:
        bucket = lookup(key)  # which may have another key by now
        return next(n for n, b in self.by_name.items() if b is bucket)

    def facts(self) -> tuple[BucketFacts, ...]:
        return tuple(bucket_facts(n, b) for n, b in self.by_name.items())


def key_of(node: fx.Node) -> str:
    """The registry key of the bucket that an fxshard op names."""
    key = node.args[1]
    assert isinstance(key, str)
    return key


def index_of(node: fx.Node) -> int:
    """The tensor id that ``gather_param``, ``gather_part``, ``reduce_grad`` or ``param_view`` names."""
    index = node.args[2]
    assert isinstance(index, int)
    return index


def stage_of(node: fx.Node) -> Stage:
    """How far a ``reduce_grad`` reduces."""
    return as_stage(str(node.args[3])) if len(node.args) > 3 else "all"


def scale_of(node: fx.Node) -> fx.Node | None:
    """What a ``reduce_grad`` multiplies by, if anything."""
    scale = node.args[4] if len(node.args) > 4 else None
    assert scale is None or isinstance(scale, fx.Node)
    return scale


def sharing_of(node: fx.Node) -> int | None:
    """How many ranks share what a ``gather_part`` gathers; None where the same graph keeps its part and so has the
    whole, and for other nodes."""
    if node.target is not GATHER_PART or source_of(node).target is KEEP_PART:
        return None
    ranks = node.args[3]
    assert isinstance(ranks, int)
    return ranks


def source_of(node: fx.Node) -> fx.Node:
    """The node's first argument: flat shard, gradient, gathered buffer, or what is waited for."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def nodes_of(graphs: Sequence[fx.Graph], targets: Sequence[object]) -> Iterator[fx.Node]:
    return (n for g in graphs for n in g.nodes if n.op == "call_function" and n.target in targets)


def short_dtype(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def bucket_facts(name: str, bucket: ParamBucket) -> BucketFacts:
    layout = bucket.layout
    return BucketFacts(
        name=name,
        unit=bucket.unit.name + name[len(bucket.name) :],
        params=tuple(s.name for s in bucket.slots),
        shapes=tuple(tuple(s) for s in layout.tensor_shapes),
        dims=tuple(s.cut.dim for s in bucket.slots),
        offsets=layout.tensor_to_offset,
        size=layout.size,
        used=layout.used,
        storage=short_dtype(bucket.dtypes.storage),
        gather=short_dtype(bucket.dtypes.gather),
        reduce=short_dtype(bucket.dtypes.reduce),
        shard_size=bucket.groups.shard_size,
        replicate_size=bucket.groups.replicate_size,
        requires_grad=bucket.requires_grad,
        reshard=bucket.unit.reshard_after_forward,
        reduce_op=bucket.reduction.op,
        divide=(bucket.reduction.before, bucket.reduction.after_shard, bucket.reduction.after_replicate),
    )


def read_graph(graph: fx.Graph, kind: str, buckets: Buckets) -> GraphFacts:
    """The facts of a graph of per-parameter collectives. Node numbers count the graph's nodes from 0."""
    place = {n: i for i, n in enumerate(graph.nodes)}
    gathers: dict[str, tuple[set[int], int, int | None]] = {}
    for node in nodes_of([graph], [GATHER, GATHER_PART]):
        name = buckets.name(key_of(node))
        use = min((place[u] for u in node.users), default=place[node])
        ids, first, sharing = gathers.setdefault(name, (set(), use, sharing_of(node)))
        ids.add(index_of(node))
        gathers[name] = (ids, min(first, use), sharing)
    reductions: dict[str, tuple[set[int], int, Stage]] = {}
    for node in nodes_of([graph], [REDUCE]):
        name = buckets.name(key_of(node))
        ids, ready, stage = reductions.setdefault(name, (set(), 0, stage_of(node)))
        ids.add(index_of(node))
        reductions[name] = (ids, max(ready, place[source_of(node)]), stage)
    present = set(gathers) | set(reductions)
    return GraphFacts(
        kind,
        tuple(f for f in buckets.facts() if f.name in present),
        tuple(GatherFact(n, tuple(sorted(ids)), first, sharing) for n, (ids, first, sharing) in gathers.items()),
        tuple(ReduceFact(n, tuple(sorted(ids)), ready, stage) for n, (ids, ready, stage) in reductions.items()),
    )
