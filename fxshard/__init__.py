"""fxshard: sharded data-parallel training through ``torch.compile``, with graphs that can be read.

The map, ground floor first; each imports only what stands before it:

    layout, placement, layout_planner     where parameters lie in a flat buffer, and who holds what
    distributed/                          runs, process groups, ranks that agree or say so
    cut, layout_tensor, bucket            flat shards, and the tensors that users hold
    ops, unshard, unit, sharding          what reading a parameter means, compiled and eager; ``fully_shard``, ``shard``
    distribute                            a plan for a whole model, carried out
    plan, cost, facts                     which collectives a graph has, and when; pure data
    passes/                               the graph rewrites, one a file
    capture, codegen, backend             torch.compile's backend
    inspect/, cli, demo                   showing it
"""

from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fxshard.distribute import distribute
from fxshard.layout import GlobalLayout
from fxshard.layout_tensor import LayoutTensor
from fxshard.sharded_class import register_forward_method
from fxshard.sharding import fully_shard, shard

__all__ = [
    "GlobalLayout",
    "LayoutTensor",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "distribute",
    "fully_shard",
    "register_forward_method",
    "shard",
]
