"""Capture: from the graph that Dynamo hands over to planned and rewritten forward and backward graphs.

AOTAutograd traces a joint graph in which reading a parameter is ``gather_param`` and its gradient ``reduce_grad``.
``tag_reshard`` marks it, the min-cut partitioner splits it, and each part is planned, rewritten and compiled.

Input mutations stay outside the graphs (AOTAutograd copies them back after each call): the min-cut partitioner computes
a wrong gradient when a buffer is mutated by the forward graph itself (seen on torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves

from fxshard import _inductor, _torch, plan_agreement
from fxshard.codegen import Compiled, generate
from fxshard.facts import GATHER, KEEP_PART, REDUCE, Buckets, index_of, key_of, nodes_of, read_graph, stage_of
from fxshard.graph_calls import Launched, before_graph
from fxshard.inspect.copies import Copies, copies_of
from fxshard.inspect.dump import Dump
from fxshard.inspect.schedule import Step, steps_of
from fxshard.options import Options
from fxshard.passes import copy_packs, fuse_all_reduces, tag_reshard
from fxshard.passes.pipeline import rewrite
from fxshard.passes.verify import verify
from fxshard.plan import Plan, make_plan
from fxshard.reduction import Stage
from fxshard.registry import lookup
from fxshard.written import check_unwritten


@dataclass
class Capture:
    """One graph of Dynamo's on its way through the pipeline.

    By kind of graph, ``plans`` has what was decided, ``steps`` the order that came of it, ``copies`` what is copied.
    """

    options: Options
    dump: Dump
    plans: dict[str, Plan] = field(default_factory=dict)
    steps: dict[str, list[Step]] = field(default_factory=dict)
    copies: dict[str, Copies] = field(default_factory=dict)

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        check_unwritten(gm)
        outputs = _output_count(gm)
        return _torch.aot_autograd(
            gm,
            inputs,
            forward=lambda g, i: self._compile_graph(g, i, "forward", outputs, len(inputs)),
            backward=lambda g, i: self._compile_graph(g, i, "backward", 0, len(inputs)),
            inference=lambda g, i: self._compile_graph(g, i, "inference", outputs, len(inputs)),
            partition=self._partition,
        )

    def _partition(self, joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, ...]:
        if self.options.codegen == "inductor":
            joint = _inductor.joint_graph_passes(joint, dict(self.options.inductor))
        self.dump.stage("joint", "captured", joint)
        tag_reshard.run(joint)
        forward, backward = _torch.min_cut_partition(joint, inputs, **kwargs)
        self._agree({"forward": forward.graph, "backward": backward.graph})
        return forward, backward

    def _agree(self, graphs: Mapping[str, fx.Graph]) -> None:
        """Before anything costly is done for graphs, hear whether the other ranks captured the like."""
        if self.options.agree:
            plan_agreement.agree(graphs, self.options, self._plan)

    def _plan(self, graph: fx.Graph, kind: str, buckets: Buckets) -> Plan:
        facts = read_graph(graph, kind, buckets)
        return make_plan(facts, prefetch=self.options.prefetch, in_flight=self.options.in_flight)

    def _compile_graph(
        self, gm: fx.GraphModule, inputs: Sequence[Any], kind: str, outputs: int, graph_inputs: int
    ) -> Compiled:
        if kind == "inference" and self.options.codegen == "inductor":
            gm = _inductor.joint_graph_passes(gm, dict(self.options.inductor))
        if kind == "inference":
            self._agree({kind: gm.graph})
        # What the running code must do around the graph, known before the passes replace these nodes.
        read = sorted({key_of(n) for n in nodes_of([gm.graph], [GATHER, KEEP_PART])})
        reduced = sorted({(key_of(n), stage_of(n), index_of(n)) for n in nodes_of([gm.graph], [REDUCE])})
        launches: list[tuple[Launched, str]] = []
        if self.options.fuse == "all-reduces" and fuse_all_reduces.run(gm).modified:
            gm.graph.lint()
            verify(gm)
            gm.recompile()
        if self.options.fuse is True:
            buckets = Buckets.of([gm.graph])
            plan = self._plan(gm.graph, kind, buckets)
            self.plans[kind] = plan
            rewrite(gm, plan, buckets, lambda stage, g: self.dump.stage(kind, stage, g))
            if self.options.pack == "copy":
                copy_packs.run(gm)
                gm.recompile()
            self.steps[kind] = steps_of(gm.graph, plan)
            self.copies[kind] = copies_of(gm.graph, self.options.codegen)
            launches = _launches(self.steps[kind], plan, buckets)
            self.dump.schedule(plan, self.steps[kind], self.copies[kind])
        if kind != "backward":
            _inductor.keep_output_strides(gm, outputs, _inductor.forward_output_start() if kind == "forward" else 0)
        static = _torch.static_inputs(gm, kind, graph_inputs, len(inputs))
        compiled = generate(gm, inputs, kind, self.options, static)
        self.dump.code(kind, _inductor.emitted_code(compiled))
        return _guarded(compiled, read, reduced, launches, self.options.agree)


def _guarded(
    compiled: Compiled,
    read: Sequence[str],
    reduced: Sequence[tuple[str, Stage, int]],
    launches: Sequence[tuple[Launched, str]],
    same_everywhere: bool,
) -> Compiled:
    """Before each call: ranks that may differ hear of its collectives, values that were stored elsewhere are taken
    over, and who gets a gradient is noted."""
    ids: dict[tuple[str, Stage], list[int]] = {}
    for key, stage, index in reduced:
        ids.setdefault((key, stage), []).append(index)

    def run(args: list[Any]) -> Any:
        before_graph(launches, same_everywhere)
        for key in read:
            lookup(key).refresh()
        for (key, stage), indices in ids.items():
            lookup(key).note(stage, indices)
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _launches(steps: Sequence[Step], plan: Plan, buckets: Buckets) -> list[tuple[Launched, str]]:
    """What is launched, in order, with the key of its bucket; a reduction of two stages once."""
    in_parts = {g.bucket for g in plan.gathers if g.ranks < plan.bucket(g.bucket).shard_size}
    launched: dict[tuple[Launched, str], None] = {}
    for step in steps:
        if step.what == "launch":
            gathers: Launched = "gather parts" if step.bucket in in_parts else "gather"
            launched[gathers if step.op == "all_gather" else "reduce", buckets.by_name[step.bucket].key] = None
    return list(launched)


def _output_count(gm: fx.GraphModule) -> int:
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    return len(tree_leaves(output.args))
