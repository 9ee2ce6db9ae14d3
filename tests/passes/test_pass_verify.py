"""verify: break one thing of a finished graph, expect one message that names both sides."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from broken_graphs import Break, call_before, forward_broken_by, launch, layers, message, wait
from pass_graphs import Sketch, backward, finished, forward, param, planned, scheduled, sharded
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard.passes import bucket_all_gather, bucket_reduce_scatter
from fxshard.passes.rewrite import MARK, call
from fxshard.passes.schedule_overlap import WAIT
from fxshard.passes.verify import verify, window

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


# ---- launches and waits ----------------------------------------------------------------------------------------------


def wait_is_gone(gm: fx.GraphModule) -> None:
    gone = wait(gm, "all_gather", "b")
    gone.replace_all_uses_with(launch(gm, "all_gather", "b"))
    gm.graph.erase_node(gone)


def wait_is_there_twice(gm: fx.GraphModule) -> None:
    call_before(wait(gm, "all_gather", "b"), WAIT, launch(gm, "all_gather", "b"))


def reader_does_not_wait(gm: fx.GraphModule) -> None:
    reader = next(iter(wait(gm, "all_gather", "b").users))
    reader.replace_input_with(wait(gm, "all_gather", "b"), launch(gm, "all_gather", "b"))


def wait_comes_late(gm: fx.GraphModule) -> None:
    next(n for n in reversed(gm.graph.nodes) if n.op == "output").prepend(wait(gm, "all_gather", "b"))


def launch_comes_late(gm: fx.GraphModule) -> None:
    wait(gm, "all_gather", "b").append(launch(gm, "all_gather", "b"))


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (wait_is_gone, r"all_gather\w* \(all_gather of bucket b\) has 0 waits, but needs exactly one; wait for it"),
        (wait_is_there_twice, r"of bucket b\) has 2 waits \(wait_tensor\w*, wait_tensor\w*\), but needs exactly one"),
        (reader_does_not_wait, r"mm\w* reads all_gather\w* \(all_gather of bucket b\) without its wait; read wait"),
        (wait_comes_late, r"slice\w* stands before wait_tensor\w*, the wait of all_gather\w* \(all_gather of"),
        (launch_comes_late, r"wait_tensor\w* stands before wait_tensor\w*, the wait of all_gather\w* \(all_g"),
    ],
)
def test_every_launch_has_one_wait_that_comes_before_every_use(
    two_ranks: None, break_it: Break, said: str
) -> None:
    assert re.search(said, forward_broken_by(break_it))


def test_the_message_shows_the_graph_around_the_node(two_ranks: None) -> None:
    gm, plan = finished(forward(layers()))
    wait_is_there_twice(gm)
    shown = message(gm, plan).splitlines()[1:]
    broken = launch(gm, "all_gather", "b")
    assert len(shown) == 7
    assert [line[2] for line in shown] == [" "] * 3 + [">"] + [" "] * 3
    assert shown[3] == f"  > {broken.format_node()}"
    assert window(next(iter(gm.graph.nodes)), around=1).count("\n") == 1


# ---- which collectives there are -------------------------------------------------------------------------------------


def second_gather(gm: fx.GraphModule) -> None:
    first = launch(gm, "all_gather", "b")
    again = call_before(first, first.target, *first.args)
    again.meta[MARK] = "b"
    call_before(first, WAIT, again)


def gather_is_gone(gm: fx.GraphModule) -> None:
    gather, waited = launch(gm, "all_gather", "b"), wait(gm, "all_gather", "b")
    waited.replace_all_uses_with(call_before(gather, _aten.repeat.default, gather.args[0], [2]))
    gm.graph.erase_node(waited)
    gm.graph.erase_node(gather)


def order_is_swapped(gm: fx.GraphModule) -> None:
    launch(gm, "all_gather", "b").prepend(launch(gm, "all_gather", "c"))


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (second_gather, "bucket b has 2 all_gathers in the forward graph, but one serves the whole graph"),
        (gather_is_gone, "the forward plan has a all_gather of bucket b, but the graph has no launch for it, so b.p0"),
        (order_is_swapped, "launched in the order a, c, b, but the plan's order, which all ranks share, is a, b, c"),
    ],
)
def test_the_graph_has_the_planned_gathers_once_each_and_in_order(
    two_ranks: None, break_it: Break, said: str
) -> None:
    assert said in forward_broken_by(break_it)


def test_a_collective_that_is_not_planned_is_named(two_ranks: None) -> None:
    gm, plan = finished(forward(layers()))
    said = message(gm, replace(plan, gathers=plan.gathers[:2]))
    assert re.search(r"all_gather\w* \(all_gather of bucket c\) is not in the forward plan; plan it or erase it", said)


def test_frozen_parameters_are_never_reduced(two_ranks: None) -> None:
    gm, plan = finished(backward(layers()), "backward")
    frozen = tuple(replace(b, requires_grad=b.name != "b") for b in plan.buckets)
    said = message(gm, replace(plan, buckets=frozen))
    assert re.search(r"reduce_scatter\w* reduces gradients of bucket b, which is frozen; erase it", said)


def test_a_frozen_parameters_share_is_found_before_it_is_fused(two_ranks: None) -> None:
    g = Sketch(sharded(a=[param(4, 4)], b=[param(4, 4, frozen=True)]), x=(4, 4))
    share = g.reduce(g.x, "a", 0)
    gm = g.output(share)
    plan, _ = planned(gm, "backward")
    call_before(share, share.target, g.x, g.buckets["b"].key, 0)
    assert "reduces gradients of bucket b, which is frozen" in message(gm, plan, after=bucket_all_gather.NAME)


@pytest.mark.parametrize(
    ("after", "kind", "op"),
    [
        (bucket_all_gather.NAME, "forward", "fxshard.gather_param.default"),
        (bucket_reduce_scatter.NAME, "backward", "fxshard.reduce_grad.default"),
    ],
)
def test_no_per_parameter_collective_is_left_after_its_pass(two_ranks: None, after: str, kind: str, op: str) -> None:
    g = Sketch(layers(), x=(4, 4))
    gm = g.output(g.gather("a", 0) if kind == "forward" else g.reduce(g.x, "a", 0))
    plan, _ = planned(gm, kind)
    said = message(gm, plan, after=after)
    assert f"({op}) is still there after {after}, which replaces it; a bucket that" in said


@pytest.mark.parametrize(("make", "kind"), [(forward, "forward"), (backward, "backward")])
def test_no_fxshard_op_is_left_after_the_last_pass(two_ranks: None, make: Any, kind: str) -> None:
    gm = make(layers())
    plan, _ = planned(gm, kind)
    scheduled(gm, kind)
    verify(gm, plan, after="schedule_overlap")
    assert re.search(r"\(fxshard\.\w+\.default\) is still there after lower_layout", message(gm, plan))


def test_an_unknown_pass_is_refused(two_ranks: None) -> None:
    gm, plan = finished(forward(layers()))
    with pytest.raises(ValueError, match="no pass is named 'lower'; passes are bucket_all_gather, "):
        verify(gm, plan, after="lower")


# ---- graphs of others ------------------------------------------------------------------------------------------------


def traced(fn: Callable[[torch.Tensor], Any]) -> fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(torch.ones(4, 4))


def test_graphs_of_other_backends_are_accepted(two_ranks: None) -> None:
    def several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, two = _c10d.all_gather_into_tensor_coalesced([x, x + 1], 2, "0")
        lists = _c10d.wait_tensor(one) * 2, _c10d.wait_tensor(two)
        return *lists, funcol.all_reduce(x, "sum", "0").t() @ x, funcol.broadcast(x, 0, "0")

    gm = traced(several)
    assert {"all_gather_into_tensor_coalesced", "all_reduce", "broadcast"} <= set(ops(gm))
    verify(gm)


def ops(gm: fx.GraphModule) -> list[str]:
    return [getattr(n.target, "__name__", "").split(".")[0] for n in gm.graph.nodes]


def test_a_wait_may_stand_behind_a_view(two_ranks: None) -> None:
    verify(traced(lambda x: _c10d.wait_tensor(_c10d.all_reduce(x, "sum", "0").view(-1)) * 2))


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x: _c10d.all_to_all_single(x, [2, 2], [2, 2], "0") + 1, "all_to_all_single.default) has 0 waits"),
        (lambda x: _read_first(_c10d.all_reduce(x, "sum", "0")), "reads all_reduce (all_reduce) without its wait"),
        (lambda x: _read_first(_c10d.all_reduce(x, "sum", "0").t()), "reads all_reduce (all_reduce) without its wait"),
        (lambda x: _c10d.all_gather_into_tensor_coalesced([x, x], 2, "0")[0] + 1, "_coalesced.default) has 0 waits"),
    ],
)
def test_collectives_of_others_are_waited_for_too(two_ranks: None, fn: Any, said: str) -> None:
    assert said in message(traced(fn), None)


def _read_first(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, _c10d.wait_tensor(x)


def test_collectives_of_the_users_model_may_stand_between_ours(two_ranks: None) -> None:
    g = Sketch(layers("ab"), x=(4, 4))
    x = g.mm(g.x, g.gather("a", 0))
    x = call(g.graph, WAIT, call(g.graph, _c10d.all_reduce.default, x, "sum", "0"))
    gm, plan = finished(g.output(g.mm(x, g.gather("b", 0))))
    verify(gm, plan)
    assert [name for name in ops(gm) if name in ("all_gather_into_tensor", "all_reduce", "mm")] == [
        *("all_gather_into_tensor", "all_gather_into_tensor", "mm"),
        *("all_reduce", "mm"),
    ]
