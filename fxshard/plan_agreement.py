"""Ranks agree on what they compiled, or say so: plans are compared when a graph is captured.

Compiled graphs have their collectives in an order fixed at compile time. Ranks whose schedules differ would wait for
each other forever or, worse, add up what does not belong together. So the ranks of a sharded model's mesh compare a
digest of the plan: parameters by full name, shapes, dtypes, layouts, collectives in order, options, torch's version.

When: right after the joint graph was split and both halves were planned, before any code is generated. All that takes
long comes later, so ranks that run the same program arrive together, and the backward graph, which may be compiled
much later, needs no comparison of its own. Once a graph; a step costs nothing.

Through the store where the ranks met, not by a collective: of two ranks that went different ways one may sit in a
collective that the other never reaches, and on the same communicator this comparison would pair with it. A store has
timeouts of its own, shows who came and who did not, and needs no group. A rank talks to it seven times, whatever the
number of ranks; texts travel only where they differ, and as text.

What needs no comparison:

* A schedule that all ranks agreed on before. One rank that recompiles, because its batch is smaller or it saw one more
  shape, gets the same collectives again and goes on; the others need not know. Only a new schedule must be everyone's.
* A graph inside of eager code, where ranks may run different graphs by right: see ``fxshard.agreement``.
* Ranks outside the mesh: each pipeline stage with a mesh of its own agrees within itself. Where ranks of one mesh
  differ by right, ``options={"agree": False}``.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from fxshard import _torch
from fxshard.bucket import ParamBucket
from fxshard.facts import GATHER, GATHER_PART, REDUCE, Buckets, index_of, key_of, nodes_of
from fxshard.inspect.plan_text import plan_text
from fxshard.mesh import share_timeout
from fxshard.options import Options
from fxshard.plan import Plan

_LINES = 60  # of a difference of plans


Planner = Callable[[fx.Graph, str, Buckets], Plan]


def agree(graphs: Mapping[str, fx.Graph], options: Options, make_plan: Planner) -> None:
    """Compare the plans of captured graphs, by kind, with the other ranks of each mesh in them; collective over it.

    Raises ``RuntimeError`` on every rank: with the difference if plans differ, or, after ``options.agree_seconds`` (at
    most nine tenths of the mesh's own timeout), naming the ranks that did not come. Does nothing where one rank is
    alone, inside of eager forwards, or over the fake process group.
    """
    buckets = Buckets.of(list(graphs.values()))
    if not buckets.by_name or any(_in_eager_code(b) for b in buckets.by_name.values()):
        return
    plans = [make_plan(graph, kind, buckets) for kind, graph in graphs.items()]
    for mesh in dict.fromkeys(_mesh(b) for b in buckets.by_name.values()):
        if mesh.size() == 1 or dist.get_backend(mesh.get_group(mesh.ndim - 1)) == "fake":
            continue
        names = [n for n, b in buckets.by_name.items() if _mesh(b) == mesh]
        text = _text([_part(plan, names) for plan in plans], options)
        if options.fuse is not True:
            text += _captured(graphs, buckets, names)
        with _torch.outside_fake_mode():
            _Comparison(mesh, text, options).run()


def _in_eager_code(bucket: ParamBucket) -> bool:
    return bucket.unit.scope.depth > 0


def _mesh(bucket: ParamBucket) -> DeviceMesh:
    return bucket.slots[0].cut.mesh


def _part(plan: Plan, names: Sequence[str]) -> Plan:
    """What a plan says of some buckets."""
    return replace(
        plan,
        buckets=tuple(b for b in plan.buckets if b.name in names),
        gathers=tuple(c for c in plan.gathers if c.bucket in names),
        reductions=tuple(c for c in plan.reductions if c.bucket in names),
    )


def _text(plans: Sequence[Plan], options: Options) -> str:
    """Plans and what they were made with, the same on ranks that agree: no rank, no address, no shape of an input."""
    names = [f.name for f in fields(options) if f.name not in ("agree", "agree_seconds")]
    chosen = {name: getattr(options, name) for name in names}
    said = "  ".join(f"{n} {json.dumps(v, sort_keys=True, default=_text_of)}" for n, v in chosen.items())
    return f"torch {torch.__version__}  {said}\n{plan_text('plans', plans)}"


def _text_of(value: object) -> object:
    """Settings as JSON; an object by its type, since its own text may have an address in it."""
    return dict(value) if isinstance(value, Mapping) else type(value).__name__


def _captured(graphs: Mapping[str, fx.Graph], buckets: Buckets, names: Sequence[str]) -> str:
    """Collectives one by one, which is how they run when they are not fused."""
    lines = []
    for kind, graph in graphs.items():
        for node in nodes_of([graph], (GATHER, GATHER_PART, REDUCE)):
            if (name := buckets.name(key_of(node))) in names:
                lines.append(f"{kind}  {'reduce' if node.target is REDUCE else 'gather'}  {name}  {index_of(node)}\n")
    return "".join(lines)


class _Comparison:
    """One exchange over the ranks of a mesh: ``text`` is this rank's."""

    def __init__(self, mesh: DeviceMesh, text: str, options: Options) -> None:
        self.text = text
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        self.rank = dist.get_rank()
        self.limit = timedelta(seconds=options.agree_seconds)
        collectives = share_timeout(mesh, mesh.ndim - 1)
        if collectives is not None:  # to be heard before a rank that already waits in one gives up
            self.limit = min(self.limit, 0.9 * collectives)
        members = hashlib.sha256(repr(self.ranks).encode()).hexdigest()
        self.store: Any = dist.PrefixStore(f"fxshard plans/{members}", _torch.default_store())

    def run(self) -> None:
        agreed = f"agreed on {self.digest}"
        if self.store.check([agreed]):
            return
        turn = self.store.add(f"turns of {self.rank}", 1)  # kept in the store: it lives as long as the group
        self.store.set(f"{turn}/digest of {self.rank}", self.digest)
        if self.store.compare_set(f"{turn}/digest", "", self.digest).decode() != self.digest:
            self.store.set(f"{turn}/differs", "")
        if self.store.add(f"{turn}/came", 1) == len(self.ranks):
            if not self.store.check([f"{turn}/differs"]):
                self.store.set(agreed, "")
            self._end(turn, "complete")
        try:
            self.store.wait([f"{turn}/end"], self.limit)
        except dist.DistStoreError:
            self._end(turn, self._absent(turn))
        end = self.store.get(f"{turn}/end").decode()
        if end != "complete":  # a rank that comes later gets the same error
            raise RuntimeError(end)
        if self.store.check([f"{turn}/differs"]):
            raise RuntimeError(self._different(turn))

    def _end(self, turn: int, how: str) -> None:
        """End the comparison for all ranks, unless it has ended."""
        self.store.compare_set(f"{turn}/end", "", how)

    def _absent(self, turn: int) -> str:
        came = [r for r in self.ranks if self.store.check([f"{turn}/digest of {r}"])]
        absent = [r for r in self.ranks if r not in came]
        return (
            f"ranks {came} compiled a graph with a schedule of collectives that is new to the run, and ranks {absent} "
            f"did not within {self.limit.total_seconds():.0f} s. Either they run code that they compiled before, or "
            "other code: shapes, flags, or a branch taken differ between ranks, so that only some had to compile. Or "
            "they ended, or are slow: then raise the backend's option 'agree_seconds' (and the group's timeout)"
        )

    def _different(self, turn: int) -> str:
        by_digest: dict[str, list[int]] = {}
        for r in self.ranks:
            by_digest.setdefault(self.store.get(f"{turn}/digest of {r}").decode(), []).append(r)
        if self.rank == by_digest[self.digest][0]:
            self.store.set(f"{turn}/text of {self.digest}", self.text)
        first, *others = by_digest
        lines = [
            f"ranks {by_digest[other]} compiled another schedule of collectives than ranks {by_digest[first]}, so that "
            "they would wait for each other forever, or add up what does not belong together. Build the same model "
            "with the same options and take the same branches on every rank; where ranks differ by right, pass the "
            "backend's options={'agree': False}"
            for other in others
        ]
        try:
            reference, *texts = [self._fetch(f"{turn}/text of {digest}") for digest in by_digest]
        except dist.DistStoreError as error:
            return "\n".join([*lines, f"(their plans could not be had: {error})"])
        for other, text in zip(others, texts, strict=True):
            sides = f"ranks {by_digest[first]}", f"ranks {by_digest[other]}"
            shown = list(difflib.unified_diff(reference.splitlines(), text.splitlines(), *sides, n=1, lineterm=""))
            lines += shown[:_LINES] + [f"({len(shown) - _LINES} more lines)"] * (len(shown) > _LINES)
        return "\n".join(lines)

    def _fetch(self, key: str) -> str:
        self.store.wait([key], self.limit)
        return self.store.get(key).decode()
