"""Private torch APIs, in one place. Each function says for which torch versions it was checked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

_D = TypeVar("_D", bound=DTensor)


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
    placements = tuple(Shard(p.dim) if isinstance(p, Shard) else p for p in placements)
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, tuple(strides), dtype))


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


def op_names(prefix: str) -> list[str]:
    """Names without namespace of the aten ops that start with ``prefix``, overloads merged, sorted. Checked: 2.13."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted({n.split("::")[1].split(".")[0] for n in names if n.startswith(f"aten::{prefix}")})


def collective_device_type(group: dist.ProcessGroup | None) -> str:
    """The device type that ``group`` (None: the default one) serves, the CPU where it serves several. Checked: 2.13."""
    return dist.distributed_c10d._get_object_coll_device(group)


def placement_with_rows(placement: Shard, rows: Callable[[int], tuple[int, int]]) -> Shard:
    """A copy of ``placement`` that states ``rows(rank)``, first row and count, as a rank's part. Checked: 2.13."""
    told = copy.copy(placement)
    told._local_shard_size_and_offset = (  # type: ignore[method-assign]
        lambda size, ranks, rank: tuple(reversed(rows(rank)))  # type: ignore[assignment, return-value]
    )
    return told


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


def inductor_compile(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], kind: str, static: Sequence[int], settings: dict[str, Any]
) -> Any:
    """Inductor's code for a partitioned ATen graph, with the order of its collectives kept. Checked: 2.13.

    ``kind`` is forward, backward or inference. Switches that reorder or rebucket collectives are off for this compile.
    """
    from torch._dynamo.utils import detect_fake_mode
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    keep_order = {
        "reorder_for_peak_memory": False,
        "reorder_for_locality": False,
        "reorder_for_compute_comm_overlap": False,
        "bucket_all_gathers_fx": "none",
        "bucket_reduce_scatters_fx": "none",
        "bucket_all_reduces_fx": "none",
    }
    known = {name: value for name, value in keep_order.items() if hasattr(config, name)}
    with config.patch({**known, **settings}), V.set_fake_mode(detect_fake_mode(inputs)):
        return compile_fx_inner(
            gm,
            inputs,
            static_input_idxs=tuple(static),
            is_backward=kind == "backward",
            is_inference=kind == "inference",
            cudagraphs=BoxedBool(config.triton.cudagraphs),
            boxed_forward_device_index=BoxedDeviceIndex(None),
        )


def emitted_code(compiled: Any) -> str | None:
    """The Python wrapper code of what ``inductor_compile`` returned; None where it did not generate any. Checked: 2.13."""
    return getattr(compiled, "source_code", None)


def joint_graph_passes(gm: torch.fx.GraphModule, settings: dict[str, Any]) -> torch.fx.GraphModule:
    """Inductor's own rewrites of a joint or inference graph (attention patterns, constant folding). Checked: 2.13."""
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes as run

    with config.patch(settings):
        return run(gm)


def keep_output_strides(gm: torch.fx.GraphModule, count: int, first: int = 0) -> None:
    """Make Inductor return outputs ``first`` to ``first + count`` with the strides of the graph. Checked: 2.13."""
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    values = output.args[0]
    last = min(first + count, len(values))
    output.meta["user_visible_output_idxs"] = [i for i in range(first, last) if isinstance(values[i], torch.fx.Node)]


def forward_output_start() -> int:
    """The number of mutated inputs that AOTAutograd returns ahead of a forward graph's own outputs. Checked: 2.13."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    return metadata.num_mutated_inp_runtime_indices if metadata is not None else 0


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
