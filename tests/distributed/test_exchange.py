"""broadcast_from and all_reduce: values, failures on any rank, exits, and ranks out of step."""

import dataclasses
import os
import pathlib
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from outcomes import fail, on_rank, outcome
from ranks import run_processes

from fxshard.distributed import all_reduce, broadcast_from, distributed_run


@dataclasses.dataclass(frozen=True)
class Settings:
    width: int


class Unprintable(Exception):
    def __str__(self):
        raise TypeError("no text")


def still_in_step(ended):
    """`ended`, and what a collective right after it gives: ranks left out of step would hang or differ here."""
    dist.barrier()
    total = torch.ones(1)
    dist.all_reduce(total)
    return ended, total.item()


def both(pool, fn, *args):
    """How `fn` ended on each rank; every rank must still be in step afterwards."""
    answers = pool.run(fn, *args, deadline=15)
    assert [total for _, total in answers] == [pool.world_size] * pool.world_size
    return [ended for ended, _ in answers]


# --- broadcast_from ----------------------------------------------------------------------------------------------


def broadcast_a_record(src):
    calls, weight = [], torch.arange(3.0)

    def fn():
        calls.append(dist.get_rank())
        return {"rank": dist.get_rank(), "weight": weight}

    got = broadcast_from("record", fn, src=src)
    got["weight"][0] = 7.0  # on src too a copy: its own tensor must not change
    return still_in_step((calls, got["rank"], got["weight"], weight[0].item()))


@pytest.mark.parametrize("src", [0, 1])
def test_fn_runs_once_on_src_and_every_rank_gets_a_copy(ranks2, src):
    answers = both(ranks2, broadcast_a_record, src)
    assert [calls for calls, *_ in answers] == [[src] if rank == src else [] for rank in range(2)]
    assert all((rank, weight.tolist(), own) == (src, [7.0, 1.0, 2.0], 0.0) for _, rank, weight, own in answers)


def test_four_ranks_get_the_value_of_rank_3(ranks4):
    assert [rank for _, rank, *_ in both(ranks4, broadcast_a_record, 3)] == [3] * 4


def broadcast_failing(error):
    fn = on_rank(0, fail(error), fail(AssertionError("fn must run on src only")))
    return still_in_step(outcome(broadcast_from, "my label", fn))


def test_src_raises_its_own_error_and_its_peer_names_label_and_src(ranks2):
    own, peer = both(ranks2, broadcast_failing, ValueError("no such file"))
    assert own == ("ValueError", "no such file")
    assert peer == ("RuntimeError", "broadcast_from('my label'): rank 0 failed with ValueError: no such file")


def test_an_interrupt_counts_as_an_error_of_src(ranks2):
    own, peer = both(ranks2, broadcast_failing, KeyboardInterrupt())
    assert (own[0], peer[0]) == ("KeyboardInterrupt", "RuntimeError")


def test_an_error_without_text_still_reaches_the_peer(ranks2):
    own, peer = ranks2.run(broadcast_unprintable, deadline=15)
    assert own == "Unprintable" and peer[0] == "RuntimeError" and "Unprintable" in peer[1]


def broadcast_unprintable():
    try:
        broadcast_from("x", on_rank(0, fail(Unprintable()), fail(AssertionError())))
    except Unprintable as error:
        return type(error).__name__
    except RuntimeError as error:
        return "RuntimeError", str(error)


@pytest.mark.parametrize(
    "code, sent", [(None, None), (0, 0), (7, 7), (True, 1), (2**70, 2**70), ("text", "text"), ((1, 2), "(1, 2)")]
)
def test_a_peer_exits_with_the_code_of_src(ranks2, code, sent):
    own, peer = both(ranks2, broadcast_failing, SystemExit(code))
    assert own == ("SystemExit", code) and peer == ("SystemExit", sent)


def exit_from_src():
    with distributed_run(timeout=timedelta(seconds=20)):
        broadcast_from("settings", lambda: sys.exit(7))


def test_both_processes_leave_with_the_exit_code_of_src():
    assert [(exit.code, exit.exception) for exit in run_processes(exit_from_src, 2)] == [(7, "SystemExit")] * 2


def broadcast_unencodable(kind):
    value = {"lambda": lambda: None, "path": pathlib.PurePosixPath("a"), "class": Settings(3)}[kind]
    return still_in_step(outcome(broadcast_from, "my label", lambda: value))


@pytest.mark.parametrize("kind", ["lambda", "path", "class"])
def test_a_value_that_cannot_be_sent_fails_on_src_and_on_its_peer(ranks2, kind):
    own, peer = both(ranks2, broadcast_unencodable, kind)
    assert own[0] not in ("value", "RuntimeError", "SystemExit")
    assert peer[0] == "RuntimeError" and "rank 0" in peer[1] and own[0] in peer[1]


def broadcast_registered():
    with torch.serialization.safe_globals([Settings]):
        return still_in_step(broadcast_from("settings", lambda: Settings(3)).width)


def test_a_registered_class_can_be_broadcast(ranks2):
    assert both(ranks2, broadcast_registered) == [3, 3]


def broadcast_under_two_labels(error=None):
    label = on_rank(0, lambda: "first", lambda: "second")()
    return still_in_step(outcome(broadcast_from, label, (lambda: 3) if error is None else fail(error)))


def test_a_receiver_under_another_label_names_both(ranks2):
    own, peer = both(ranks2, broadcast_under_two_labels)
    assert own == ("value", 3)
    assert peer[0] == "RuntimeError" and "'first'" in peer[1] and "'second'" in peer[1]


def test_a_receiver_under_another_label_does_not_exit_with_src(ranks2):
    own, peer = both(ranks2, broadcast_under_two_labels, SystemExit(3))
    assert own == ("SystemExit", 3) and peer[0] == "RuntimeError"


def broadcast_from_outside(src):
    return still_in_step(outcome(broadcast_from, "x", fail(AssertionError("fn must not run")), src))


@pytest.mark.parametrize("src", [-1, 2, True])
def test_a_src_outside_the_world_is_refused_before_fn_runs(ranks2, src):
    for kind, text in both(ranks2, broadcast_from_outside, src):
        assert kind == "ValueError" and f"global rank from 0 to 1, got {src}" in text


def test_a_single_process_gets_the_object_itself(group_of_one):
    value = lambda: None  # noqa: E731 (a value that no codec takes)
    assert broadcast_from("x", lambda: value) is value
    assert all_reduce("x", lambda: value, lambda values: values)[0] is value
    dist.destroy_process_group()
    assert broadcast_from("x", lambda: value) is value
    assert all_reduce("x", lambda: value, lambda values: values)[0] is value


def test_a_group_of_one_is_a_single_process_even_on_a_launch(monkeypatch, group_of_one):
    monkeypatch.setenv("WORLD_SIZE", "4")
    value = object()
    assert broadcast_from("x", lambda: value) is value


def test_a_launch_without_a_group_is_refused_before_fn_runs(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    fn = fail(AssertionError("fn must not run"))
    with pytest.raises(RuntimeError, match=r"broadcast_from\('x'\).*WORLD_SIZE=2.*no process group"):
        broadcast_from("x", fn)
    with pytest.raises(RuntimeError, match=r"all_reduce\('x'\).*WORLD_SIZE=2.*no process group"):
        all_reduce("x", fn, min)


def test_a_label_that_is_no_string_is_refused():
    with pytest.raises(ValueError, match="label of broadcast_from must be a string"):
        broadcast_from(3, lambda: 1)
    with pytest.raises(ValueError, match="label of all_reduce must be a string"):
        all_reduce(None, lambda: 1, min)


# --- all_reduce --------------------------------------------------------------------------------------------------


def reduce_ranks():
    rank = dist.get_rank()
    smallest = all_reduce("batch size", lambda: 10 - rank, min)
    everything = all_reduce("everything", lambda: {"rank": rank, "x": torch.full((rank,), rank)}, lambda values: values)
    return still_in_step((smallest, [(each["rank"], each["x"].tolist()) for each in everything]))


def test_combine_gets_every_value_in_rank_order_on_every_rank(ranks4):
    values = [(rank, [rank] * rank) for rank in range(4)]
    assert both(ranks4, reduce_ranks) == [(7, values)] * 4


def reduce_failing(errors):
    error = errors.get(dist.get_rank())
    return still_in_step(outcome(all_reduce, "my label", (lambda: 1) if error is None else fail(error), sum))


def test_one_error_is_raised_on_its_rank_and_named_on_the_others(ranks4):
    ended = both(ranks4, reduce_failing, {2: KeyError("key")})
    assert ended.pop(2) == ("KeyError", "'key'")
    assert ended == [("RuntimeError", "all_reduce('my label'): rank 2 failed with KeyError: 'key'")] * 3


def test_with_two_errors_the_others_name_the_first_rank(ranks4):
    zero, one, two, three = both(ranks4, reduce_failing, {1: KeyError("k"), 3: ValueError("v")})
    assert (one, three) == (("KeyError", "'k'"), ("ValueError", "v"))
    assert zero == two == ("RuntimeError", "all_reduce('my label'): rank 1 failed with KeyError: 'k'")


def test_an_error_outranks_an_exit(ranks4):
    zero, one, two, three = both(ranks4, reduce_failing, {0: SystemExit(5), 1: ValueError("v")})
    assert one == ("ValueError", "v")
    assert zero == two == three == ("RuntimeError", "all_reduce('my label'): rank 1 failed with ValueError: v")


def test_an_interrupt_outranks_an_exit(ranks4):
    ended = both(ranks4, reduce_failing, {0: SystemExit(5), 2: KeyboardInterrupt()})
    assert [kind for kind, _ in ended] == ["RuntimeError", "RuntimeError", "KeyboardInterrupt", "RuntimeError"]


def test_with_exits_only_each_exiter_keeps_its_code_and_the_others_take_the_first(ranks4):
    ended = both(ranks4, reduce_failing, {1: SystemExit(4), 2: SystemExit(6)})
    assert ended == [("SystemExit", code) for code in (4, 4, 6, 4)]


def exit_on_ranks_1_and_2():
    with distributed_run(timeout=timedelta(seconds=20)) as state:
        all_reduce("settings", (lambda: 1, lambda: sys.exit(4), lambda: sys.exit(6))[state.rank], sum)


def test_processes_leave_with_their_own_exit_code_or_the_first():
    assert [exit.code for exit in run_processes(exit_on_ranks_1_and_2, 3)] == [4, 4, 6]


def reduce_under_two_labels(errors):
    error = errors.get(dist.get_rank())
    label = on_rank(0, lambda: "first", lambda: "second")()
    try:
        return still_in_step(("value", all_reduce(label, (lambda: 1) if error is None else fail(error), sum), None))
    except BaseException as raised:
        return still_in_step((type(raised).__name__, str(raised), type(raised.__cause__).__name__))


def test_ranks_out_of_step_all_raise_and_list_the_labels(ranks4):
    for kind, text, cause in both(ranks4, reduce_under_two_labels, {}):
        assert (kind, cause) == ("RuntimeError", "NoneType")
        assert "'first' by rank [0], 'second' by rank [1, 2, 3]" in text


def test_being_out_of_step_outranks_errors_and_exits_which_become_the_cause(ranks4):
    ended = both(ranks4, reduce_under_two_labels, {0: ValueError("v"), 1: SystemExit(3)})
    assert [kind for kind, *_ in ended] == ["RuntimeError"] * 4
    assert [cause for *_, cause in ended] == ["ValueError", "SystemExit", "NoneType", "NoneType"]


def reduce_a_lambda_of_rank_1():
    return still_in_step(outcome(all_reduce, "x", on_rank(1, lambda: lambda: None, lambda: 1), len))


def test_a_value_that_cannot_be_sent_counts_as_the_error_of_its_rank(ranks2):
    peer, own = both(ranks2, reduce_a_lambda_of_rank_1)
    assert own[0] not in ("value", "RuntimeError", "SystemExit")
    assert peer[0] == "RuntimeError" and "rank 1 failed with" in peer[1]


def combine_fails():
    return still_in_step(outcome(all_reduce, "x", lambda: 1, fail_on_list))


def fail_on_list(values):
    raise ZeroDivisionError(len(values))


def test_a_failing_combine_raises_on_every_rank(ranks2):
    assert both(ranks2, combine_fails) == [("ZeroDivisionError", "2")] * 2


def exchange_under_a_default_device():
    with torch.device("meta"):
        got = all_reduce("x", lambda: 1, sum), broadcast_from("y", lambda: 2)
    return still_in_step(got)


def test_a_default_device_of_the_caller_does_not_reach_the_transfer(ranks2):
    assert both(ranks2, exchange_under_a_default_device) == [(2, 2)] * 2


def test_in_a_fake_world_every_rank_is_taken_to_agree(fake_world):
    with fake_world(64, rank=5):
        assert all_reduce("plan", lambda: "digest", lambda values: values) == ["digest"] * 64


# --- what neither can help with ----------------------------------------------------------------------------------


def die_before_an_exchange():
    with distributed_run(timeout=timedelta(seconds=20)) as state:
        all_reduce("both are here", lambda: 1, sum)
        if state.rank == 1:
            time.sleep(0.5)
            os._exit(9)
        began = time.monotonic()
        kind, _ = outcome(all_reduce, "one is gone", lambda: 1, sum)
        print(kind, time.monotonic() - began < 10)
        sys.stdout.flush()
        raise RuntimeError("leave")


def test_the_death_of_a_peer_surfaces_long_before_the_timeout():
    survivor, dead = run_processes(die_before_an_exchange, 2)
    assert dead.code == 9
    assert survivor.stdout == "RuntimeError True\n" and survivor.code == 1
