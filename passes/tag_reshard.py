"""Mark which full parameters are gathered again in backward and which are kept.

before:  joint graph   w = gather_param(flat, b, i);  y = f(x, w);  ...;  gx = g(gy, w)
after:   the same, where w and everything that is only w in another form (views, casts) carries

    MUST_RECOMPUTE   where the bucket reshards after forward: the partitioner puts a gather into both graphs
    MUST_SAVE        where it does not: w is saved, backward has no gather

Where it reshards to a number of ranks, backward gathers from the parts that those keep of what forward gathered:

         p = keep_part(flat, b, ranks)           MUST_SAVE
         w = gather_part(p, b, i, ranks)         MUST_RECOMPUTE; forward has the whole, see bucket_all_gather

Leaves alone: nodes that mix w with other data, and forms of w that only compute gradients.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils.checkpoint import CheckpointPolicy

from fxshard.facts import GATHER, GATHER_PART, KEEP_PART, index_of, key_of, nodes_of, source_of
from fxshard.passes.liveness import is_view
from fxshard.passes.rewrite import call
from fxshard.registry import lookup

NAME = "tag_reshard"

# Two neighbouring checkpointed regions save the tensor between them if the later region has the higher number. Gathers
# are inputs of every region, so theirs is the highest.
_REGION = 1 << 40

_aten = torch.ops.aten
_COPIES = {_aten.clone.default, _aten._to_copy.default, torch.ops.prims.convert_element_type.default}


def run(gm: fx.GraphModule) -> PassResult:
    forms: dict[fx.Node, CheckpointPolicy] = _keep_parts(gm.graph)
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is GATHER:
            bucket = lookup(node.args[1])
            reshard = bucket.unit.reshard_after_forward and bucket.groups.gather is not None
            forms[node] = CheckpointPolicy.MUST_RECOMPUTE if reshard else CheckpointPolicy.MUST_SAVE
        elif is_view(node) or node.target in _COPIES:
            source = node.args[0]
            if forms.get(source) is CheckpointPolicy.MUST_RECOMPUTE:
                forms[node] = CheckpointPolicy.MUST_RECOMPUTE
    for node, policy in forms.items():
        node.meta["recompute"] = policy
        node.meta["ac_graph_id"] = _REGION
    return PassResult(gm, modified=bool(forms))


def _keep_parts(graph: fx.Graph) -> dict[fx.Node, CheckpointPolicy]:
    """Let buckets that reshard to a number of ranks be read from parts."""
    parts: dict[str, fx.Node] = {}
    forms: dict[fx.Node, CheckpointPolicy] = {}
    for read in [n for n in nodes_of([graph], [GATHER]) if lookup(key_of(n)).kept_part is not None]:
        key = key_of(read)
        ranks = lookup(key).kept_part.size  # type: ignore[union-attr]
        with graph.inserting_before(read):
            if key not in parts:
                parts[key] = call(graph, KEEP_PART, source_of(read), key, ranks)
                _stand_for(parts[key], read)
                forms[parts[key]] = CheckpointPolicy.MUST_SAVE
            whole = call(graph, GATHER_PART, parts[key], key, index_of(read), ranks)
        _stand_for(whole, read)
        forms[whole] = CheckpointPolicy.MUST_RECOMPUTE
        read.replace_all_uses_with(whole)
        graph.erase_node(read)
    return forms


def _stand_for(node: fx.Node, read: fx.Node) -> None:
    """Let a new node be of the same part of the joint graph as ``read``; what depends on its arguments is its own."""
    node.meta = {**{k: v for k, v in read.meta.items() if k != "eager_input_vals"}, **node.meta}
