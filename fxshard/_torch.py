"""Private torch APIs, in one place. Each function says for which torch versions it was checked."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

_D = TypeVar("_D", bound=DTensor)
_F = TypeVar("_F", bound=Callable[..., Any])


def mesh_of_one(device_type: str) -> DeviceMesh:
    """A 1-D mesh of this process alone, without any process group. Checked: 2.13, 2.14."""
    return DeviceMesh(device_type, [0], mesh_dim_names=("shard",), _init_backend=False, _rank=0)


def saved_tensor_hooks_active() -> bool:
    """Whether a saved-tensor hook is in force on this thread. Checked: 2.13."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def dtensor_spec(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype) -> Any:
    """What a DTensor of a contiguous full ``shape`` keeps of its mesh, placements and dtype. Checked: 2.13."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    # DTensorSpec checks its order of shards against plain Shard, which our own kinds of placement are not equal to.
    checked = tuple(Shard(p.dim) if isinstance(p, Shard) else p for p in placements)
    spec = DTensorSpec(mesh, checked, tensor_meta=TensorMeta(shape, tuple(strides), dtype))
    spec.placements = placements
    return spec


def new_dtensor(cls: type[_D], local: torch.Tensor, spec: Any, requires_grad: bool) -> _D:
    """An instance of a DTensor subclass around ``local``, without running its ``__init__``. Checked: 2.13."""
    return torch.Tensor._dtensor__new__(cls, local, spec, requires_grad=requires_grad)  # type: ignore[attr-defined]


def allow_foreach(cls: type[torch.Tensor]) -> None:
    """Let optimizers and gradient clipping choose multi-tensor code for ``cls``, as DTensor does. Checked: 2.13."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for supported in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if cls not in supported:
            supported.append(cls)  # type: ignore[arg-type]


def collective_device_type(group: dist.ProcessGroup | None) -> str:
    """The device type that ``group`` (None: the default one) serves, the CPU where it serves several. Checked: 2.13."""
    return dist.distributed_c10d._get_object_coll_device(group)


def default_store() -> dist.Store:
    """The key-value store in which the ranks of the default group met. Checked: 2.13."""
    return dist.distributed_c10d._get_default_store()


def other_connection(store: dist.Store) -> dist.Store:
    """The same store through a connection of its own: a wait keeps one busy. Checked: 2.13."""
    return store.clone()  # type: ignore[attr-defined]


def group_timeout(group: dist.ProcessGroup | None, device_type: str) -> timedelta | None:
    """How long a collective over ``group`` (None: the default one) waits for its peers; None if its backend does not
    say. Checked: 2.13 (gloo, fake)."""
    group = group or dist.distributed_c10d._get_default_group()
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    return getattr(options, "_timeout", None)


def new_group(ranks: Sequence[int], timeout: timedelta | None, what: str, backend: str | None = None) -> Any:
    """A new group over ``ranks``, which alone call this; ``what`` it is for, in one word. Checked: 2.13.

    Its name, by which members find each other, is made of the ranks and the number of such groups before it. torch
    would name it by the number of all groups that a process knows: where that differs between ranks, because some are
    in more groups than others, they would wait for each other in vain.
    """
    c10d: Any = dist.distributed_c10d
    stem = f"fxshard-{what}-{hashlib.sha1(repr(list(ranks)).encode(), usedforsecurity=False).hexdigest()}-"
    name = stem + str(sum(known.startswith(stem) for known in c10d._world.pg_names.values()))
    by_count = c10d._process_group_name
    c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        return dist.new_group(
            list(ranks), timeout, backend=backend, use_local_synchronization=True, group_desc=f"fxshard {what}"
        )
    finally:
        c10d._process_group_name = by_count


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let later collectives over ``group`` (gloo's or NCCL's) wait as long. Checked: 2.13, 2.14 (gloo)."""
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # public in 2.14
    set_timeout(timeout, group)


def default_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout of a group of this backend that is made without one. Checked: 2.13."""
    return dist.distributed_c10d._get_default_timeout(dist.get_backend(group))


def outside_fake_mode() -> AbstractContextManager[Any]:
    """Within it tensors are real, also while a graph is traced. Checked: 2.13."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def placement_with_rows(placement: Shard, rows: Callable[[int], tuple[int, int]]) -> Shard:
    """A copy of ``placement`` that states ``rows(rank)``, first row and count, as a rank's part. Checked: 2.13."""
    told = copy.copy(placement)
    told._local_shard_size_and_offset = (  # type: ignore[method-assign]
        lambda curr_local_size, num_chunks, rank: tuple(reversed(rows(rank)))  # type: ignore[arg-type, assignment, return-value]
    )
    return told


def local_shape(shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Size:
    """Of what this rank holds of a DTensor. Checked: 2.13."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return torch.Size(compute_local_shape_and_global_offset(shape, mesh, placements)[0])


def boxed_forward(gm: torch.fx.GraphModule) -> Any:
    """The graph as a function of one list, which it empties so that inputs are freed at their last use. Checked: 2.13.

    Where torch has no boxed code generator, inputs live until the call ends.
    """
    codegen = getattr(torch.fx.graph, "_BoxedCodeGen", None)
    if codegen is not None:
        gm.graph.set_codegen(codegen())
    gm.recompile()

    def run(args: list[Any]) -> Any:
        if codegen is not None:
            return gm.forward(args)
        taken = tuple(args)
        args.clear()
        return gm.forward(*taken)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def aot_autograd(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], *, forward: Any, backward: Any, inference: Any, partition: Any
) -> Any:
    """Trace ``gm`` with AOTAutograd into ATen graphs and give them to the compilers named. Checked: 2.13."""
    from torch._dynamo.backends.common import aot_autograd as make
    from torch._dynamo.utils import detect_fake_mode
    from torch._functorch import config as functorch_config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    compiler = make(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    with functorch_config.patch(unlift_effect_tokens=True), V.set_fake_mode(detect_fake_mode(inputs)):
        return compiler(gm, inputs)


def min_cut_partition(joint: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Split a joint graph into forward and backward, recomputing what is cheap or tagged. Checked: 2.13."""
    from functorch.compile import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **kwargs)


def static_inputs(gm: torch.fx.GraphModule, kind: str, graph_inputs: int, count: int) -> list[int]:
    """Numbers of the inputs of a partitioned graph that stay at their address from call to call. Checked: 2.13."""
    from torch._inductor.utils import count_tangents, num_fw_fixed_arguments

    if kind == "backward":
        return list(range(count_tangents(gm)))
    return list(range(num_fw_fixed_arguments(graph_inputs, count)))


def is_tracing() -> bool:
    """Whether Dynamo or AOTAutograd is tracing on this thread. Checked: 2.13."""
    return torch._guards.TracingContext.try_get() is not None


def keep_dynamo_out(modules: Sequence[str]) -> None:
    """Make Dynamo run frames of these modules as they are, and break graphs at calls into them. Checked: 2.13."""
    from torch._dynamo import trace_rules

    for module in modules:
        trace_rules.add(module)


def saved_for_backward(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """What a forward graph returns for backward to use; all it returns where that is not described. Checked: 2.13."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    values = torch.utils._pytree.tree_leaves(output.args)
    described = output.meta.get("desc") or [None] * len(values)
    kept = (v for v, d in zip(values, described, strict=True) if d is None or "SavedForBackward" in type(d).__name__)
    return [v for v in kept if isinstance(v, torch.fx.Node)]


NO_BACKWARD = -1


def current_backward() -> int:
    """A number for the backward that runs on this thread, unique in this process, or ``NO_BACKWARD``. Checked: 2.13."""
    return torch._C._current_graph_task_id()


def never_compile_alone(function: Any) -> None:
    """Let Dynamo inline ``function`` into what it compiles, but not compile its frame by itself. Checked: 2.13."""
    from torch._C._dynamo import eval_frame

    action = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def outside_dynamo(function: _F) -> _F:
    """Let Dynamo compile neither ``function`` nor what it calls. Not for functions in traced code. Checked: 2.13."""
    from torch._C._dynamo import eval_frame

    action = eval_frame._FrameAction
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(action.SKIP, action.SKIP))
    return function


def outside_transforms() -> AbstractContextManager[Any]:
    """Within it no functorch transform (vmap, grad) is in force; cheap where none was. Checked: 2.13."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of a name, as graph nodes hold it. Checked: 2.13."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def profiler_is_on() -> bool:
    """Whether torch's profiler records on this thread. Checked: 2.13."""
    return torch._C._autograd._profiler_enabled()
