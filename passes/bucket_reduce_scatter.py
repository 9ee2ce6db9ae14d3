"""Merge the reductions of one bucket into one reduce-scatter (and one all-reduce over replicas).

before:  r0 = reduce_grad(g0, b, 0);  r1 = reduce_grad(g1, b, 1);  flat_grad = add(r0, r1)
after:   p = pack_grads([g0, g1], b, [0, 1])                    full gradients at their offsets, reduce dtype
         [p = add_waiting(p, b, "none", "all")]                where a unit ever accumulated without reducing
         [p = mul(p, scale)]                                    where it has a scaling factor
         r = reduce_scatter_tensor(p, "sum");  s = div(wait_tensor(r), shard ranks)
         [s = add_waiting(s, b, "shard", "all")]
         [t = all_reduce(s, "sum");  s = div(wait_tensor(t), replicas)]     where the mesh has replicas
         flat_grad = convert_element_type(s, storage dtype)     unless it is for main_grad, at stage "main"

At stage "shard" the chain ends behind the reduce-scatter, at stage "none" behind the pack. The merged nodes stand after
the last gradient. Gradients of one parameter that is used several times are summed in the reduce dtype before they are
packed. Divisors are those of ``fxshard.reduction``.

Leaves alone (a ``Refusal`` says so): a bucket whose shares are used otherwise than in one sum of them all, or whose
shares differ in stage or scale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from fxshard.bucket import ParamBucket
from fxshard.facts import ADD, ADD_WAITING, REDUCE, Buckets, index_of, key_of, scale_of, source_of, stage_of
from fxshard.passes.rewrite import call, convert, fake_of, mark
from fxshard.plan import Plan
from fxshard.reduction import Stage
from fxshard.registry import lookup

NAME = "bucket_reduce_scatter"
_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten


@dataclass(frozen=True)
class Refusal:
    """A bucket whose reductions stay one per parameter, and why. ``key`` is the bucket's in the graph."""

    bucket: str
    key: str
    because: str


def run(gm: fx.GraphModule, plan: Plan, buckets: Buckets) -> PassResult:
    names = dict.fromkeys(c.bucket for c in plan.reductions)
    # The last one first: where buckets share their last gradient, each is put right after it.
    merged = [_merge(gm.graph, buckets, name) for name in reversed(names)]
    refusals = [m for m in merged if isinstance(m, Refusal)]
    if refusals:
        gm.meta["fxshard_refusals"] = refusals
    return PassResult(gm, modified=len(refusals) < len(merged))


def _merge(graph: fx.Graph, buckets: Buckets, name: str) -> Refusal | None:
    bucket = buckets.by_name[name]
    sums, tops, ways = sums_of(graph, bucket)
    if len(tops) != 1 or len(ways) != 1:
        because = "its parameters' shares are used by something else than one sum of them all"
        if len(ways) != 1:
            because = "its parameters' shares are reduced as far as different stages, or scaled differently"
        return Refusal(name, key_of(next(iter(sums))), because)
    shares = _added_up(tops[0], sums)
    place = {n: i for i, n in enumerate(graph.nodes)}
    last = max(map(source_of, shares), key=lambda n: place[n])
    if last.op == "placeholder":  # a gradient that backward is given as it is
        last = graph.find_nodes(op="placeholder")[-1]
    ordered = sorted(shares, key=index_of)
    with graph.inserting_after(last):
        anchor = graph.call_function(_aten.alias.default, (last,))  # a place to insert before; erased below
    with graph.inserting_before(anchor):
        grads, ids = [source_of(s) for s in ordered], [index_of(s) for s in ordered]
        key = key_of(shares[0])
        packed = call(graph, torch.ops.fxshard.pack_grads.default, grads, key, ids)
        grad = _Chain(graph, bucket, key, name).reduce(packed, *next(iter(ways)))
    tops[0].replace_all_uses_with(grad)
    graph.erase_node(anchor)
    for node in reversed(sums):
        graph.erase_node(node)
    return None


def sums_of(
    graph: fx.Graph, bucket: ParamBucket
) -> tuple[dict[fx.Node, None], list[fx.Node], set[tuple[Stage, fx.Node | None]]]:
    """The bucket's shares and every sum of nothing else, in graph order; those of them that anything else uses; and how
    shares are reduced: (stage, scale)."""
    sums: dict[fx.Node, None] = {}
    for node in graph.nodes:
        is_share = node.target is REDUCE and lookup(key_of(node)) is bucket
        if is_share or (node.target is ADD and not node.kwargs and all(arg in sums for arg in node.args)):
            sums[node] = None
    tops = [n for n in sums if any(user not in sums for user in n.users)]
    return sums, tops, {(stage_of(n), scale_of(n)) for n in sums if n.target is REDUCE}


def _added_up(total: fx.Node, sums: Iterable[fx.Node]) -> list[fx.Node]:
    """The shares in a sum, in graph order; one that is in it several times comes as often."""
    times = Counter([total])
    for node in reversed(list(sums)):
        if node.target is ADD:
            for arg in node.args:
                assert isinstance(arg, fx.Node)
                times[arg] += times[node]
    return [n for n in sums if n.target is REDUCE for _ in range(times[n])]


@dataclass(frozen=True)
class _Chain:
    """The nodes of one bucket's reduction, made at the graph's insertion point."""

    graph: fx.Graph
    bucket: ParamBucket
    key: str
    name: str

    def reduce(self, packed: fx.Node, stage: Stage, scale: fx.Node | None) -> fx.Node:
        """What the stage gives of packed gradients."""
        if stage == "none":
            return mark(self.name, packed)
        groups, rule = self.bucket.groups, self.bucket.reduction
        node = self._with_waiting(packed, "none", stage)
        if scale is not None:
            node = self._call(_aten.mul.Tensor, node, scale)
        node = self._divide(node, rule.before)
        if groups.reduce is not None:
            scatter = _c10d.reduce_scatter_tensor.default
            node = self._collective(node, scatter, rule.op, groups.shard_size, groups.reduce)
        node = self._divide(node, rule.after_shard)
        if stage == "shard":
            return node
        node = self._with_waiting(node, "shard", stage)
        if groups.replicate is not None:
            node = self._collective(node, _c10d.all_reduce.default, rule.op, groups.replicate)
        node = self._divide(node, rule.after_replicate)
        if self.bucket.grad_dtype != self.bucket.dtypes.reduce:
            node = mark(self.name, convert(self.graph, node, self.bucket.grad_dtype))
        if self.bucket.offloaded_from is not None:
            node = self._call(_aten._to_copy.default, node, device=self.bucket.flat.device)
        return node

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return mark(self.name, call(self.graph, target, *args, **kwargs))

    def _with_waiting(self, node: fx.Node, kept: Stage, stage: Stage) -> fx.Node:
        if not self.bucket.unreduced.may_wait:
            return node
        return self._call(ADD_WAITING, node, self.key, kept, stage)

    def _divide(self, node: fx.Node, divisor: float) -> fx.Node:
        return node if divisor == 1 else self._call(_aten.div.Tensor, node, divisor)

    def _collective(self, node: fx.Node, op: Any, *args: Any) -> fx.Node:
        """Launch and wait; backends know no complex numbers, so those travel as pairs of reals."""
        is_complex = fake_of(node).dtype.is_complex
        if is_complex:
            node = call(self.graph, _aten.view.default, call(self.graph, _aten.view_as_real.default, node), [-1])
        node = self._call(_c10d.wait_tensor.default, self._call(op, node, *args))
        if is_complex:
            pairs = call(self.graph, _aten.view.default, node, [-1, 2])
            node = call(self.graph, _aten.view_as_complex.default, pairs)
        return node
