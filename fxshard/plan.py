"""Plans: which collectives a graph has, what travels in each, and where each is launched and waited for.

Pure data, equal on every rank: no torch.fx, no process group, no rank. ``make_plan`` decides from facts; the passes
carry the plan out; the printer and the golden files show it; JSON keeps it.

Layer order, not guesses:

* all-gathers: units in order of first use. A unit's gathers are launched right after the wait of the unit ``prefetch``
  places before it, hence before that unit's compute; the first ones at the start of the graph. Each is waited for at
  its first use. A unit whose buckets are first used apart, with another unit's between, counts as several.
* reductions: in order of last gradient, units likewise. Each is launched right after its last gradient and waited for
  when the next unit's gradients are complete, just before that one's launch; the last at the end of the graph. With a
  replicate stage, the all-reduce of a unit is launched at that wait, and waited for one unit later. ``in_flight`` is
  how many units of each kind (reduce-scatter, all-reduce) may be on their way; 0 waits for each at its launch.
* gradients that are not reduced all the way (stage "shard" or "none") leave the graph after the stage they reach.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from fxshard.reduction import Stage


@dataclass(frozen=True)
class BucketFacts:
    """A bucket as plans see it. Sizes in elements; ``shapes[i]``, ``dims[i]``, ``offsets[i]`` are of ``params[i]``."""

    name: str
    unit: str
    params: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # storage form: the dim that is cut first
    dims: tuple[int, ...]  # that dim's place in the logical shape
    offsets: tuple[int, ...]
    size: int
    used: int
    storage: str  # dtypes, by torch's short names
    gather: str
    reduce: str
    shard_size: int
    replicate_size: int
    requires_grad: bool
    reshard: bool
    reduce_op: str = "sum"  # on the wire
    divide: tuple[float, float, float] = (1.0, 1.0, 1.0)  # before, after reduce-scatter, after all-reduce

    @property
    def segment(self) -> int:
        """Elements of one rank's segment."""
        return self.size // self.shard_size


@dataclass(frozen=True)
class GatherFact:
    """Parameters ``ids`` of a bucket are read in the graph, first at node number ``first_use``, from segments, or from
    parts that ``sharing`` ranks kept of what was gathered before."""

    bucket: str
    ids: tuple[int, ...]
    first_use: int
    sharing: int | None = None


@dataclass(frozen=True)
class ReduceFact:
    """The graph makes gradients for parameters ``ids`` of a bucket, the last at node number ``ready``, and reduces them
    as far as ``stage``."""

    bucket: str
    ids: tuple[int, ...]
    ready: int
    stage: Stage = "all"


_F = TypeVar("_F", GatherFact, ReduceFact)


@dataclass(frozen=True)
class GraphFacts:
    """What a captured graph says of communication. ``kind`` is forward, backward or inference."""

    kind: str
    buckets: tuple[BucketFacts, ...]
    gathers: tuple[GatherFact, ...]
    reductions: tuple[ReduceFact, ...]

    def bucket(self, name: str) -> BucketFacts:
        return next(b for b in self.buckets if b.name == name)


@dataclass(frozen=True)
class Anchor:
    """A place in a graph. ``at`` is "start", "end", "first use" (of the collective's own data), "last gradient", "at
    launch" (its own) or, with a bucket, "after wait", "before wait" or "before launch" of that bucket's first
    collective of the same kind (gathers or reductions)."""

    at: str
    bucket: str = ""

    def __str__(self) -> str:
        return f"{self.at} {self.bucket}".rstrip()


@dataclass(frozen=True)
class Collective:
    """One fused collective of a graph over ``ranks`` ranks: all_gather, reduce_scatter or all_reduce. With one rank it
    is not in the graph, but what it stands for (a full parameter, a mean gradient) is. Gradients that are not reduced
    at all are an "accumulate": packed, and no collective."""

    op: str
    bucket: str
    ranks: int
    ids: tuple[int, ...]
    launch: Anchor
    wait: Anchor


@dataclass(frozen=True)
class Plan:
    """The communication of one graph, in launch order within each kind."""

    kind: str
    prefetch: int
    buckets: tuple[BucketFacts, ...]
    gathers: tuple[Collective, ...]
    reductions: tuple[Collective, ...]
    in_flight: int = 1

    def bucket(self, name: str) -> BucketFacts:
        return next(b for b in self.buckets if b.name == name)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that ``to_json`` wrote. ``ValueError`` when the text is none."""
        raw = json.loads(text)
        try:
            return Plan(
                raw["kind"],
                raw["prefetch"],
                tuple(BucketFacts(**{k: _frozen(v) for k, v in b.items()}) for b in raw["buckets"]),
                tuple(_collective(c) for c in raw["gathers"]),
                tuple(_collective(c) for c in raw["reductions"]),
                raw["in_flight"],
            )
        except (KeyError, TypeError) as e:
            raise ValueError(f"not a plan in JSON as Plan.to_json writes it: {e}") from e


def _collective(raw: dict[str, Any]) -> Collective:
    return Collective(
        raw["op"], raw["bucket"], raw["ranks"], tuple(raw["ids"]), Anchor(**raw["launch"]), Anchor(**raw["wait"])
    )


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def make_plan(facts: GraphFacts, *, prefetch: int = 1, in_flight: int = 1) -> Plan:
    """Decide launch and wait of every collective. Deterministic; ``ValueError`` for a negative number.

    ``prefetch`` is how many units ahead gathers are launched; 0 launches each at its own first use. ``in_flight`` is
    how many units' reductions of each kind may be under way; 0 waits for each at its launch.
    """
    for name, number in (("prefetch", prefetch), ("in_flight", in_flight)):
        if number < 0:
            raise ValueError(f"{name} counts units and is at least 0, got {number}")
    gathers, reductions = _plan_gathers(facts, prefetch), _plan_reductions(facts, in_flight)
    return Plan(facts.kind, prefetch, facts.buckets, tuple(gathers), tuple(reductions), in_flight)


def _plan_gathers(facts: GraphFacts, prefetch: int) -> list[Collective]:
    ordered = sorted(facts.gathers, key=lambda g: (g.first_use, g.bucket))
    first_use = Anchor("first use")
    launches = {g.bucket: first_use for g in ordered}  # where the group has one rank, it stays at that
    units = _group_by_unit(facts, [g for g in ordered if facts.bucket(g.bucket).shard_size > 1])
    for position, gathers in enumerate(units) if prefetch else ():
        launch = Anchor("start")
        if position >= prefetch:
            # Several buckets of that unit: after the wait of the last one, when the unit is complete.
            launch = Anchor("after wait", units[position - prefetch][-1].bucket)
        launches.update({g.bucket: launch for g in gathers})
    ranks = {g.bucket: g.sharing or facts.bucket(g.bucket).shard_size for g in ordered}
    return [Collective("all_gather", g.bucket, ranks[g.bucket], g.ids, launches[g.bucket], first_use) for g in ordered]


def _plan_reductions(facts: GraphFacts, in_flight: int) -> list[Collective]:
    ordered = sorted(facts.reductions, key=lambda r: (r.ready, r.bucket))
    # Where there is one rank, the mean gradient is there at once, and nothing waits for it.
    units = _group_by_unit(facts, [r for r in ordered if r.stage != "none" and _ranks(facts.bucket(r.bucket)) > 1])
    number = {r.bucket: i for i, unit in enumerate(units) for r in unit}
    following = {r.bucket: later[0].bucket for unit, later in zip(units, units[in_flight:], strict=False) for r in unit}
    # With second stages in the graph, whole all-reduces take their turn among them: one unit's at a time.
    queues = in_flight > 0 and any(_has_second_stage(facts.bucket(r.bucket), r) for r in ordered)
    planned: list[Collective] = []
    second: list[tuple[int, Collective]] = []  # stages that are launched later, with their unit's number

    def launch_second(up_to: int) -> None:
        planned.extend(c for unit, c in second if unit <= up_to)
        second[:] = [(unit, c) for unit, c in second if unit > up_to]

    for r in ordered:
        bucket, after = facts.bucket(r.bucket), following.get(r.bucket)
        launch, done = Anchor("last gradient"), Anchor("before launch", after) if after else Anchor("end")
        if in_flight == 0:
            done = Anchor("at launch")
        if r.stage == "none" or (r.stage == "shard" and bucket.shard_size == 1):
            planned.append(Collective("accumulate", r.bucket, 1, r.ids, launch, launch))
            continue
        if in_flight and r.bucket in number:
            launch_second(number[r.bucket] - in_flight)
        second_done = done
        if in_flight and after and facts.bucket(after).shard_size > 1:
            second_done = Anchor("before wait", after)
        if bucket.shard_size > 1:
            planned.append(Collective("reduce_scatter", r.bucket, bucket.shard_size, r.ids, launch, done))
            if _has_second_stage(bucket, r):
                launch = Anchor("after wait", r.bucket)
                stage = Collective("all_reduce", r.bucket, bucket.replicate_size, r.ids, launch, second_done)
                second.append((number[r.bucket], stage)) if in_flight else planned.append(stage)
        elif queues and bucket.replicate_size > 1:
            whole = Collective("all_reduce", r.bucket, bucket.replicate_size, r.ids, done, second_done)
            second.append((number[r.bucket], whole))
        else:
            planned.append(Collective("all_reduce", r.bucket, bucket.replicate_size, r.ids, launch, done))
    launch_second(len(units))
    return planned


def _has_second_stage(bucket: BucketFacts, reduction: ReduceFact) -> bool:
    return reduction.stage in ("all", "main") and bucket.shard_size > 1 and bucket.replicate_size > 1


def _ranks(bucket: BucketFacts) -> int:
    return bucket.shard_size * bucket.replicate_size


def _group_by_unit(facts: GraphFacts, ordered: Sequence[_F]) -> list[list[_F]]:
    """Neighbours of one unit together."""
    return [list(group) for _, group in itertools.groupby(ordered, key=lambda g: facts.bucket(g.bucket).unit)]
