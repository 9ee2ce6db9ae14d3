"""Does the code that Inductor emitted keep the order of the graph? Read from the code itself.

Inductor may reorder anything its data dependencies allow. A launch moved down to its wait hides nothing, so a schedule
is only worth something if it survives to the code that runs.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

import torch
from torch import fx

from fxshard.passes.schedule_overlap import LAUNCHES, WAIT

log = logging.getLogger(__name__)

_CALL = re.compile(
    r"torch\.ops\._c10d_functional\."
    r"(?P<op>all_gather_into_tensor|reduce_scatter_tensor|all_reduce|wait_tensor)(?:_out|_)?\.default\("
    r"|(?P<heavy>extern_kernels\.\w+|torch\.ops\.aten\.(?:_scaled_dot_product\w+|convolution_backward)(?:\.\w+)?)\("
)
_HEAVY = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"}
_KIND = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce"}


class OrderError(RuntimeError):
    """Generated code launches or waits in another order than the scheduled graph."""


@dataclass(frozen=True)
class Event:
    """A launch, a wait or the end, and how many heavy kernels (matmuls, attention, convolutions) come before it."""

    what: str
    heavy_before: int


def order_in_graph(graph: fx.Graph) -> list[Event]:
    """Launches and waits of a graph, in order, and its end."""
    events, heavy = [], 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in LAUNCHES:
            events.append(Event(f"launch {LAUNCHES[node.target]}", heavy))
        elif node.target is WAIT:
            events.append(Event("wait", heavy))
        elif is_heavy(node):
            heavy += 1
    return [*events, Event("the end", heavy)]


def is_heavy(node: fx.Node) -> bool:
    """Whether a node stays one kernel call of its own in generated code: a matmul, an attention or a convolution."""
    name = getattr(node.target, "__name__", "").split(".")[0]
    return name in _HEAVY or name.startswith("_scaled_dot_product")


def order_in_code(code: str) -> list[Event]:
    """Launches and waits of Inductor's Python wrapper code, in order, and its end."""
    events: list[Event] = []
    heavy = 0
    for match in _CALL.finditer(code):
        if match["heavy"]:
            heavy += 1
        elif match["op"] == "wait_tensor":
            events.append(Event("wait", heavy))
        else:
            events.append(Event(f"launch {_KIND[match['op']]}", heavy))
    return [*events, Event("the end", heavy)]


def check(wanted: list[Event], code: str | None, mode: str) -> None:
    """Compare and, by ``mode``, raise ``OrderError``, warn, or do nothing.

    Launches must come no later and waits no earlier among the heavy kernels than in the graph. Where the code has
    another number of heavy kernels (Inductor writes tiny matmuls as loops), only the sequence is compared.
    """
    if mode == "off" or code is None:
        return
    there = order_in_code(code)
    same_kernels = there[-1].heavy_before == wanted[-1].heavy_before
    for place, (want, got) in enumerate(zip(wanted, there, strict=False)):
        if want.what != got.what:
            return _tell(mode, f"at place {place} it has {got.what}, the schedule has {want.what}")
        late = want.what.startswith("launch") and got.heavy_before > want.heavy_before
        early = want.what == "wait" and got.heavy_before < want.heavy_before
        if same_kernels and (late or early):
            said = f"{want.what} at place {place} stands after {got.heavy_before} heavy kernels"
            return _tell(mode, f"{said}, in the schedule after {want.heavy_before}")
    return None


def _tell(mode: str, what: str) -> None:
    said = (
        f"generated code has another order of collectives than the schedule: {what} (torch {torch.__version__}); "
        'communication may not overlap with compute. options={"codegen": "eager"} keeps the order; '
        "FXSHARD_DUMP=dir shows the code"
    )
    if mode == "error":
        raise OrderError(said)
    log.warning(said)
