"""A plan as text: layouts of buckets and anchors of collectives. Independent of the torch version; golden."""

from __future__ import annotations

from collections.abc import Sequence

from fxshard.cost import buffer_bytes, plan_wire_bytes
from fxshard.inspect.schedule import short
from fxshard.plan import BucketFacts, Plan


def plan_text(title: str, plans: Sequence[Plan]) -> str:
    """The plans of a model's graphs: every bucket once, then each graph's collectives in launch order."""
    buckets: dict[str, BucketFacts] = {}
    for plan in plans:
        buckets.update({b.name: b for b in plan.buckets})
    lines = [f"# {title}", ""]
    for bucket in buckets.values():
        lines += _bucket_lines(bucket)
    for plan in plans:
        lines += ["", f"{plan.kind}  prefetch {plan.prefetch}  {plan_wire_bytes(plan)} bytes sent per rank"]
        lines += _collective_lines(plan)
    return "\n".join(lines) + "\n"


def _bucket_lines(b: BucketFacts) -> list[str]:
    dtypes = " ".join(dict.fromkeys(map(short, (b.storage, b.gather, b.reduce))))
    if short(b.storage) != dtypes:
        dtypes = f"stored {short(b.storage)} gathered {short(b.gather)} reduced {short(b.reduce)}"
    waste = (b.size - b.used) / b.used if b.used else 0.0
    said = [
        f"bucket {b.name}",
        f"shard {b.shard_size}" + (f" replicate {b.replicate_size}" if b.replicate_size > 1 else ""),
        dtypes,
        f"size {b.size} segment {b.segment} waste {waste:.2%}",
        ("reshard" if b.reshard else "keep") + ("" if b.requires_grad else " frozen"),
    ]
    width = len(str(b.size))
    lines = ["  ".join(said)]
    for name, shape, dim, offset in sorted(zip(b.params, b.shapes, b.dims, b.offsets, strict=True), key=lambda p: p[3]):
        cut = f" cut along dim {dim}" if dim else ""
        lines.append(f"  {offset:>{width}}  {'×'.join(map(str, shape))}  {name}{cut}")
    return lines


def _collective_lines(plan: Plan) -> list[str]:
    collectives = [*plan.gathers, *plan.reductions]
    width = max((len(c.bucket) for c in collectives), default=0)
    lines = []
    for c in collectives:
        bucket = plan.bucket(c.bucket)
        over = f"  from parts of {c.ranks} ranks" if c.op == "all_gather" and c.ranks < bucket.shard_size else ""
        part = f"{len(c.ids)} of {len(bucket.params)} parameters"
        lines.append(
            f"  {c.op:<14} {c.bucket:<{width}}  launch {c.launch!s:<24} wait {c.wait!s:<24} "
            f"{buffer_bytes(c, bucket)} bytes  {part}{over}"
        )
    return lines
