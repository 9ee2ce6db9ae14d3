"""Mark which full parameters are gathered again in backward and which are kept.

before:  joint graph   w = gather_param(flat, b, i);  y = f(x, w);  ...;  gx = g(gy, w)
after:   the same, where w and everything that is only w in another form (views, casts) carries

    MUST_RECOMPUTE   where the bucket reshards after forward: the partitioner puts a gather into both graphs
    MUST_SAVE        where it does not: w is saved, backward has no gather

Leaves alone: nodes that mix w with other data, and forms of w that only compute gradients.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils.checkpoint import CheckpointPolicy

from fxshard.facts import GATHER
from fxshard.passes.liveness import is_view
from fxshard.registry import lookup

NAME = "tag_reshard"

# Two neighbouring checkpointed regions save the tensor between them if the later region has the higher number. Gathers
# are inputs of every region, so theirs is the highest.
_REGION = 1 << 40

_aten = torch.ops.aten
_COPIES = {_aten.clone.default, _aten._to_copy.default, torch.ops.prims.convert_element_type.default}


def run(gm: fx.GraphModule) -> PassResult:
    forms: dict[fx.Node, CheckpointPolicy] = {}
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
