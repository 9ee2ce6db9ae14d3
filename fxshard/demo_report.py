"""What the demo prints: losses side by side, communication by the dumped plans, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fxshard.cost import plan_wire_bytes
from fxshard.inspect.schedule import Step
from fxshard.plan import Collective, Plan

LEARNED = 0.75
"""The last loss must be under this part of the first one."""


def tolerance(bf16: bool) -> float:
    """The largest difference between the two loss curves that passes, in nats.

    fp32: 1e-4. Measured over 60 steps on CPUs: 6e-7. Sums are in another order, no more.
    bf16: 5e-3. Measured: 6e-4. Both trainings cast the same tensors, but generated code keeps fp32 between the
    operations that it fuses, where the plain model rounds each to bf16 (4e-3 relative).
    """
    return 5e-3 if bf16 else 1e-4


@dataclass(frozen=True)
class Traffic:
    """Communication of one training step on one rank."""

    per_parameter: int  # collectives without fusion: one for every parameter and graph
    gathers: int
    reductions: int
    sent: int  # bytes
    hidden: int  # launches with compute before their wait
    exposed: tuple[str, ...]  # the others: graph, collective and bucket


def read_traffic(folder: Path) -> Traffic:
    """Communication of a step that ran every graph dumped in ``folder`` once. ``FileNotFoundError`` without a plan."""
    files = sorted(folder.glob("graph*/*-plan.json"))
    if not files:
        raise FileNotFoundError(f"no plan (graph*/*-plan.json) in the dump folder {folder}: nothing was compiled")
    per_parameter = gathers = reductions = sent = hidden = 0
    exposed: list[str] = []
    for file in files:
        plan = Plan.from_json(file.read_text(encoding="utf-8"))
        launched = [c for c in (*plan.gathers, *plan.reductions) if _ranks(plan, c) > 1]
        per_parameter += sum(len(c.ids) for c in launched)
        gathers += sum(c.op == "all_gather" for c in launched)
        reductions += sum(c.op != "all_gather" for c in launched)
        sent += plan_wire_bytes(plan)
        (schedule,) = file.parent.glob(f"*-{plan.kind}-schedule.txt")
        waiting = list(_exposed(read_steps(schedule.read_text(encoding="utf-8"))))
        exposed += [f"{plan.kind} {step.op} {step.bucket}" for step in waiting]
        hidden += len(launched) - len(waiting)
    return Traffic(per_parameter, gathers, reductions, sent, hidden, tuple(exposed))


def _ranks(plan: Plan, collective: Collective) -> int:
    """Ranks of a collective's group; a plan also has those of one rank, which no graph launches."""
    bucket = plan.bucket(collective.bucket)
    return bucket.replicate_size if collective.op == "all_reduce" else bucket.shard_size


def read_steps(schedule: str) -> list[Step]:
    """Launches, waits and compute of a dumped schedule of one graph, in order; compute without what it computes."""
    steps = []
    for line in schedule.splitlines():
        match line.split():
            case ["--", "compute", *_]:
                steps.append(Step("compute"))
            case [_, ("launch" | "wait") as what, op, bucket, *_]:
                steps.append(Step(what, op, bucket))
    return steps


def _exposed(steps: Sequence[Step]) -> Iterator[Step]:
    """Launches that nothing is computed behind before their wait."""
    pending: dict[tuple[str, str], Step] = {}
    for step in steps:
        if step.what == "compute":
            pending.clear()
        elif step.what == "launch":
            pending[step.op, step.bucket] = step
        elif (launch := pending.pop((step.op, step.bucket), None)) is not None:
            yield launch


def curves_text(sharded: Sequence[float], unsharded: Sequence[float], rows: int = 7) -> str:
    """Both loss curves at ``rows`` steps, first and last among them, and their difference there."""
    last = len(sharded) - 1
    shown = sorted({round(i * last / (rows - 1)) for i in range(rows)})
    lines = [f"{'step':>6}  {'sharded':>9}  {'unsharded':>9}  difference"]
    for i in shown:
        lines.append(f"{i + 1:>6}  {sharded[i]:>9.5f}  {unsharded[i]:>9.5f}  {abs(sharded[i] - unsharded[i]):>10.1e}")
    return "\n".join(lines)


def traffic_text(traffic: Traffic) -> str:
    """Communication of a step in a few lines."""
    fused = traffic.gathers + traffic.reductions
    if fused == 0:
        return "one rank: nothing is communicated"
    lines = [
        f"collectives per step   {traffic.per_parameter} if each parameter had its own; {fused} fused "
        f"({traffic.gathers} all-gathers, {traffic.reductions} reductions)",
        f"bytes sent per step    {traffic.sent:,} by each rank",
        f"launched ahead         {traffic.hidden} of {fused} launches have compute between them and their wait",
    ]
    if traffic.exposed:
        lines.append(f"nothing to hide behind {'; '.join(traffic.exposed)}")
    return "\n".join(lines)


def largest_difference(sharded: Sequence[float], unsharded: Sequence[float]) -> float:
    """The largest difference of two loss curves at one step, NaN if any loss is."""
    differences = [abs(a - b) for a, b in zip(sharded, unsharded, strict=True)]
    return next((d for d in differences if d != d), max(differences))


def complaints(sharded: Sequence[float], unsharded: Sequence[float], bf16: bool) -> list[str]:
    """A sentence for each thing that is wrong with the two loss curves; none if the demo passes."""
    found = []
    difference, allowed = largest_difference(sharded, unsharded), tolerance(bf16)
    if not difference < allowed:  # NaN too
        found.append(
            f"sharded and unsharded training differ: the largest difference of their losses is {difference:.1e}, and "
            f"should be under {allowed:.0e}"
        )
    if not sharded[-1] < LEARNED * sharded[0]:
        found.append(
            f"the model did not learn: its last loss is {sharded[-1]:.4f}, and should be under {LEARNED} of the first, "
            f"{sharded[0]:.4f}; give it more --steps"
        )
    return found
