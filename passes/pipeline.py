"""The passes in order. Verified after each, and whoever breaks a rule is named.

    joint graph:              tag_reshard
    forward, backward graph:  bucket_all_gather ▸ bucket_reduce_scatter ▸ schedule_overlap ▸ lower_layout
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from fxshard.facts import Buckets
from fxshard.passes import (
    bucket_all_gather,
    bucket_reduce_scatter,
    lower_layout,
    schedule_overlap,
)
from fxshard.passes.verify import VerifyError, verify
from fxshard.plan import Plan

Watch = Callable[[str, fx.GraphModule], None]


def rewrite(gm: fx.GraphModule, plan: Plan, buckets: Buckets, watch: Watch = lambda stage, gm: None) -> fx.GraphModule:
    """Run every pass on a captured graph, in place; ``watch`` sees the graph as captured and after each pass.

    Raises ``VerifyError`` naming the pass after which a rule does not hold.
    """
    steps: list[tuple[str, Callable[[], PassResult]]] = [
        (bucket_all_gather.NAME, lambda: bucket_all_gather.run(gm, plan, buckets)),
        (bucket_reduce_scatter.NAME, lambda: bucket_reduce_scatter.run(gm, plan, buckets)),
        (schedule_overlap.NAME, lambda: schedule_overlap.run(gm, plan)),
        (lower_layout.NAME, lambda: lower_layout.run(gm)),
    ]
    watch("captured", gm)
    for name, step in steps:
        step()
        try:
            gm.graph.lint()
            verify(gm, plan, after=name)
        except (VerifyError, RuntimeError) as e:
            raise VerifyError(f"after {name}: {e}") from e
        watch(name, gm)
    gm.recompile()
    return gm
