"""What happens around each run of a compiled graph, beside the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from fxshard.registry import lookup

if TYPE_CHECKING:
    from fxshard.bucket import ParamBucket
    from fxshard.scope import Scope

Launched = Literal["gather", "gather parts", "reduce"]


def before_graph(launches: Sequence[tuple[Launched, str]], same_everywhere: bool) -> None:
    """Let other ranks know which collectives this rank runs next, where ranks may differ; see ``fxshard.agreement``.

    ``launches``: collectives of the graph in launch order, each with its bucket's key.
    ``same_everywhere``: whether all ranks should run graphs with the same ones, where all of a forward is compiled.
    """
    by_scope: dict[Scope, list[tuple[Launched, ParamBucket]]] = {}
    for what, key in launches:
        bucket = lookup(key)
        by_scope.setdefault(bucket.unit.scope, []).append((what, bucket))
    for scope, of_scope in by_scope.items():
        scope.before_graph(of_scope, same_everywhere)
