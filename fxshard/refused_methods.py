"""Methods of ``torch.distributed.fsdp.FSDPModule`` for which a sharded model has nothing to do, refused by name.

They tune how FSDP2 allocates buffers, orders collectives or synchronises streams, which here a graph says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

_GRAPH = "collectives are nodes of the compiled graph, and a pass can replace them"
_BUFFERS = "the compiled graph allocates the buffers of its collectives"

INSTEAD = {
    "set_custom_all_gather": _GRAPH,
    "set_custom_reduce_scatter": _GRAPH,
    "set_all_reduce_hook": "use hooks of parameters, register_post_accumulate_grad_hook",
    "set_allocate_memory_from_process_group_for_comm": _BUFFERS,
    "set_symm_mem_for_comm": _BUFFERS,
    "set_separate_reduce_scatter_group": "gathers and reductions have groups of their own already",
    "set_force_sum_reduction_for_comms": 'the mean is a sum that is divided afterwards, as set_reduce_op_type("avg")',
    "set_reduce_scatter_divide_factor": "use set_gradient_divide_factor",
    "set_reduce_scatter_max_input_buffers": 'buffers in flight are bounded by options={"in_flight": n}',
    "set_reduce_scatter_unused_params": "a parameter without a gradient on every rank keeps .grad None",
    "set_unshard_in_backward": "use set_reshard_after_forward(False) to keep parameters full for backward",
    "set_post_optim_event": "gathers wait for the optimizer as any operation does",
}
"""What to do in place of each method, or why there is nothing to do."""

_C = TypeVar("_C", bound=type)


def refuse_the_rest(cls: _C) -> _C:
    """Give a class those methods; each raises ``NotImplementedError`` that says what to do instead."""
    for name, instead in INSTEAD.items():
        setattr(cls, name, _refusing(name, instead))
    return cls


def _refusing(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"a module that fxshard sharded has no {name}: {instead}")

    refuse.__name__ = name
    return refuse
