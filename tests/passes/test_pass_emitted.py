"""emitted: the order of launches and waits is read from generated code and compared with the graph's."""

from __future__ import annotations

import logging
import re

import pytest
from pass_graphs import finished, forward, param, sharded

from fxshard import emitted
from fxshard.emitted import Event, OrderError, check, order_in_code, order_in_graph

CODE = """
# Topologically Sorted Source Nodes: [], Original ATen: [_c10d_functional.all_gather_into_tensor]
# %all_gather : call_function[target=torch.ops._c10d_functional.all_gather_into_tensor.default](args = (%x, 2, 0))
buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(primals_1, 2, '0')
torch.ops._c10d_functional.wait_tensor.default(buf0)
buf1 = torch.ops._c10d_functional.all_gather_into_tensor.default(primals_2, 2, '0')
cpp_fused_relu_0(buf0, buf2)
extern_kernels.mm(buf2, reinterpret_tensor(buf0, (4, 4), (4, 1), 0), out=buf3)
torch.ops._c10d_functional.wait_tensor.default(buf1)
buf4 = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(buf3, buf1, buf1, 0.0, True)
buf5 = torch.ops._c10d_functional.reduce_scatter_tensor.default(buf4, 'sum', 2, '0')
buf6 = torch.ops.aten.convolution_backward.default(buf4, buf1)
torch.ops._c10d_functional.wait_tensor.default(buf5)
torch.ops._c10d_functional.all_reduce_.default(buf9, 'sum', '0')
extern_kernels.addmm(buf1, buf2, buf3, alpha=1, beta=1, out=buf7)
torch.ops._c10d_functional.wait_tensor.default(buf9)
extern_kernels.bmm(buf1, buf2, out=buf8)
"""

ORDER = [
    Event("launch all_gather", 0),
    Event("wait", 0),
    Event("launch all_gather", 0),
    Event("wait", 1),
    Event("launch reduce_scatter", 2),
    Event("wait", 3),
    Event("launch all_reduce", 3),
    Event("wait", 4),
    Event("the end", 5),
]


def lines(code: str) -> list[str]:
    return code.strip().splitlines()


def moved(code: str, part: str, behind: str) -> str:
    """The code with the line that has ``part`` moved to just behind the one that has ``behind``."""
    rest = lines(code)
    line = rest.pop(next(i for i, said in enumerate(rest) if part in said))
    rest.insert(next(i for i, said in enumerate(rest) if behind in said) + 1, line)
    return "\n".join(rest)


def test_launches_and_waits_are_read_from_code_with_the_kernels_between_them() -> None:
    assert order_in_code(CODE) == ORDER


def test_code_without_collectives_has_an_end_only() -> None:
    assert order_in_code("extern_kernels.mm(a, b, out=c)") == [Event("the end", 1)]


def test_collectives_of_lists_are_not_taken_for_ours() -> None:
    assert order_in_code("torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default([a], 2, '0')") == [
        Event("the end", 0)
    ]


def test_the_graphs_order_counts_its_matmuls(two_ranks: None) -> None:
    gm, _ = finished(forward(sharded(a=[param(4, 4)], b=[param(4, 4)])))
    launch, wait = "launch all_gather", "wait"
    wanted = [(launch, 0), (wait, 0), (launch, 0), (wait, 1), ("the end", 2)]
    assert order_in_graph(gm.graph) == [Event(*event) for event in wanted]


def test_the_same_order_is_fine() -> None:
    check(ORDER, CODE, "error")


def test_a_launch_moved_early_and_a_wait_moved_late_are_fine() -> None:
    check(ORDER, moved(CODE, "reduce_scatter_tensor.default(", "wait_tensor.default(buf1)"), "error")
    check(ORDER, moved(CODE, "wait_tensor.default(buf1)", "_scaled_dot_product"), "error")


def test_a_launch_moved_behind_a_kernel_is_an_error() -> None:
    late = moved(CODE, "all_gather_into_tensor.default(primals_2", "extern_kernels.mm")
    said = "launch all_gather at place 2 stands after 1 heavy kernels, in the schedule after 0"
    with pytest.raises(OrderError, match=re.escape(said)):
        check(ORDER, late, "error")


def test_a_wait_moved_before_a_kernel_is_an_error() -> None:
    early = moved(CODE, "wait_tensor.default(buf1)", "cpp_fused_relu_0")
    with pytest.raises(OrderError, match="wait at place 3 stands after 0 heavy kernels, in the schedule after 1"):
        check(ORDER, early, "error")


def test_the_last_wait_moved_before_a_kernel_is_an_error() -> None:
    early = moved(CODE, "wait_tensor.default(buf9)", "all_reduce_")
    with pytest.raises(OrderError, match="wait at place 7 stands after 3 heavy kernels, in the schedule after 4"):
        check(ORDER, early, "error")


def test_another_sequence_is_an_error_whatever_the_kernels() -> None:
    swapped = moved(CODE, "wait_tensor.default(buf0)", "all_gather_into_tensor.default(primals_2")
    with pytest.raises(OrderError, match="at place 1 it has launch all_gather, the schedule has wait"):
        check(ORDER, swapped, "error")
    fewer = "\n".join(line for line in lines(CODE) if "wait_tensor.default(buf9)" not in line)
    for code in (fewer, fewer.replace("extern_kernels.mm", "cpp_fused_mm")):
        with pytest.raises(OrderError, match="at place 7 it has the end, the schedule has wait"):
            check(ORDER, code, "error")


def test_where_a_matmul_became_a_loop_only_the_sequence_is_compared() -> None:
    check(ORDER, CODE.replace("extern_kernels.mm", "cpp_fused_mm"), "error")


def test_a_warning_says_what_differs_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(emitted.log, "warning", said.append)
    check(ORDER, moved(CODE, "all_gather_into_tensor.default(primals_2", "extern_kernels.mm"), "warn")
    (warning,) = said
    assert "generated code has another order of collectives than the schedule: launch all_gather" in warning
    assert 'options={"codegen": "eager"} keeps the order' in warning and "FXSHARD_DUMP" in warning
    assert isinstance(emitted.log, logging.Logger)


@pytest.mark.parametrize("code", [None, "extern_kernels.mm(a, b, out=c)"])
def test_nothing_is_compared_when_it_is_off_and_without_code(code: str | None) -> None:
    check(ORDER, code, "off")
    check(ORDER, None, "error")
