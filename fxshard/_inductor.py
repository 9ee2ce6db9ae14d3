"""Inductor's private APIs, in one place: the part of ``_torch`` that is costly to import.

Each function says for which torch versions it was checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.utils import detect_fake_mode
from torch._inductor import config, ir
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch._inductor.custom_graph_pass import CustomSchedulerPass
from torch._inductor.dependencies import WeakDep
from torch._inductor.fx_passes.joint_graph import joint_graph_passes as run_joint_graph_passes
from torch._inductor.lowering import fallback_handler, full, register_lowering
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode
from torch._inductor.utils import BoxedBool, is_collective, is_wait, sympy_product
from torch._inductor.virtualized import V

from fxshard import ops  # noqa: F401  defines concat

_ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


class KeepOrder(CustomSchedulerPass):
    """Pin launches and waits between the heavy kernels where the graph has them. Checked: 2.13, 2.14.

    Data dependencies alone let the scheduler move a launch down to its wait, or delay it by fusing the last gradient
    of one layer with a kernel of the next. Ordering-only dependencies make a chain of the launches and waits: each
    comes after the heavy kernels (matmuls, attention, convolutions: whatever runs as a kernel of its own) that stand
    before it, and before those behind it. Pointwise kernels stay free to fuse where that keeps the chain, but one that
    reads gathered values comes after the launch behind their wait.
    """

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        event: BaseSchedulerNode | None = None
        since: list[BaseSchedulerNode] = []
        gather: BaseSchedulerNode | None = None  # the last launch or wait of an all-gather
        gathered: set[str] = set()  # their buffers
        for node in nodes:
            reads_gathered = any(read.name in gathered for read in node.read_writes.reads)
            if is_collective(node.node) or is_wait(node.node):
                _after(node, [*([event] if event else []), *since])
                event, since = node, []
                if reads_gathered or is_collective(node.node, _ALL_GATHER):
                    gather = node
                    gathered |= set(node.get_buffer_names())
            elif event is not None and (isinstance(node, ExternKernelSchedulerNode) or node.is_template()):
                _after(node, [event])
                since.append(node)
            elif gather is not None and reads_gathered:
                _after(node, [gather])
        if event is not None:
            event.scheduler.compute_ancestors()  # what fusion consults for cycles
        return nodes

    def uuid(self) -> str:
        return "fxshard.KeepOrder.3"


def _after(node: BaseSchedulerNode, others: Sequence[BaseSchedulerNode]) -> None:
    for other in others:
        name = next(iter(other.get_buffer_names()))
        # The field says which of the node's buffers overwrites the other's; none does, so fusion may not drop the dep.
        node.add_fake_dep(WeakDep(name, mutating_buf=name, is_fake=True))


_copy_concat = fallback_handler(torch.ops.fxshard.concat.default, add_to_fallback_set=False)


@register_lowering(torch.ops.fxshard.concat.default, type_promotion_kind=None)
def _lower_concat(pieces: Sequence[ir.TensorBox], offsets: Sequence[int], size: int) -> ir.TensorBox:
    """A buffer into which what computes each piece writes it, and zeros into the gaps. Checked: 2.13.

    Inductor's own concatenation does so for pieces that are neighbours along one dim; here each piece keeps its shape
    and is a view of the 1-D buffer at its offset. So a matmul's output is that view, and a pointwise kernel stores
    there; only what another kernel allocates by itself (a convolution's backward) is copied. Inductor makes no kernels
    for complex numbers, so those are copied all.
    """
    device, dtype = pieces[0].get_device_or_error(), pieces[0].get_dtype()
    if dtype.is_complex:
        return _copy_concat(pieces, offsets, size)
    buffer = ir.ConcatKernel(name=None, layout=ir.FixedLayout(device, dtype, [size], [1]), inputs=[])
    box = ir.StorageBox(buffer)
    written = []

    def write(piece: ir.IRNode, offset: int) -> None:
        shape = piece.get_size()
        layout = ir.FixedLayout(device, dtype, shape, ir.FlexibleLayout.contiguous_strides(shape), offset)
        written.append(ir.ConcatKernel.realize_into(piece, ir.ReinterpretView(data=box, layout=layout)))

    at = 0
    for piece, offset in zip(pieces, offsets, strict=True):
        if offset > at:
            write(full([offset - at], 0, dtype=dtype, device=device), at)
        write(piece, offset)
        at = offset + int(sympy_product(piece.get_size()))
    if at < size:
        write(full([size - at], 0, dtype=dtype, device=device), at)
    buffer.name = V.graph.register_buffer(buffer)
    buffer.inputs = ir.ConcatKernel.unwrap_storage(written)
    V.graph.register_operation(buffer)
    return ir.TensorBox(box)


def inductor_compile(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], kind: str, static: Sequence[int], settings: dict[str, Any]
) -> Any:
    """Inductor's code for a partitioned ATen graph, with the order of its collectives kept. Checked: 2.13.

    ``kind`` is forward, backward or inference. Switches that reorder or rebucket collectives are off for this compile.
    """
    keep_order = {
        "reorder_for_peak_memory": False,
        "reorder_for_locality": False,
        "reorder_for_compute_comm_overlap": False,
        "bucket_all_gathers_fx": "none",
        "bucket_reduce_scatters_fx": "none",
        "bucket_all_reduces_fx": "none",
    }
    known = {name: value for name, value in keep_order.items() if hasattr(config, name)}
    known["_pre_fusion_custom_pass"] = KeepOrder()
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
    """The Python wrapper code of what ``inductor_compile`` returned; None where there is none. Checked: 2.13."""
    return getattr(compiled, "source_code", None)


def joint_graph_passes(gm: torch.fx.GraphModule, settings: dict[str, Any]) -> torch.fx.GraphModule:
    """Inductor's own rewrites of a joint or inference graph (attention patterns, constant folding). Checked: 2.13."""
    with config.patch(settings):
        return run_joint_graph_passes(gm)


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
