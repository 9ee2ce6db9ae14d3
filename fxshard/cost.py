"""What a plan costs on the wire: bytes per rank and graph.

Ring algorithms: of a buffer of S bytes over n ranks, a rank sends and receives S (n - 1) / n bytes in an all-gather or
a reduce-scatter, and twice that in an all-reduce (a reduce-scatter followed by an all-gather).
"""

from __future__ import annotations

import torch

from fxshard.plan import BucketFacts, Collective, Plan


def itemsize(dtype: str) -> int:
    """Bytes of one element of a dtype by its short name."""
    return getattr(torch, dtype).itemsize


def buffer_bytes(collective: Collective, bucket: BucketFacts) -> int:
    """Bytes of the whole buffer that a collective moves: gathered, packed, or for an all-reduce one reduced segment. Of
    gradients that accumulate: of the packed buffer."""
    if collective.op == "all_gather":
        return bucket.size * itemsize(bucket.gather)
    elements = bucket.segment if collective.op == "all_reduce" else bucket.size
    return elements * itemsize(bucket.reduce)


def wire_bytes(collective: Collective, bucket: BucketFacts) -> int:
    """Bytes that one rank sends (and receives) for a collective; none to accumulate."""
    if collective.op == "accumulate":
        return 0
    ranks, trips = collective.ranks, 2 if collective.op == "all_reduce" else 1
    return trips * buffer_bytes(collective, bucket) * (ranks - 1) // ranks


def plan_wire_bytes(plan: Plan) -> int:
    """Bytes that one rank sends in one run of the plan's graph."""
    return sum(wire_bytes(c, plan.bucket(c.bucket)) for c in (*plan.gathers, *plan.reductions))
