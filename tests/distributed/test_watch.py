"""The watch over the ranks of a run: places in words, and roll calls; here all ranks are threads over one store.

How it ends processes is tested in ``test_faults``.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from outcomes import fail, replaced
from torch import nn

from fxshard.distributed.watch import Watch
from fxshard.distributed.where import stack_now, where_now, where_raised


def misuse() -> None:
    nn.Linear(2, 2)(torch.ones(3))


def wait_for(event: threading.Event) -> None:
    event.wait()


@contextlib.contextmanager
def waiting_thread() -> Iterator[threading.Thread]:
    """A thread that waits in ``wait_for``."""
    over = threading.Event()
    thread = threading.Thread(target=wait_for, args=(over,))
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        thread.join()


def test_the_place_of_an_error_is_the_users_line_and_what_it_was_inside_of() -> None:
    with pytest.raises(RuntimeError) as caught:
        misuse()
    place = where_raised(caught.value)
    assert re.fullmatch(r"distributed/test_watch.py:\d+ in misuse \(inside modules/linear.py:\d+ in forward\)", place)


def test_the_place_in_a_torch_op_names_the_op() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ops.aten.mm.default(torch.ones(2, 3), torch.ones(2, 3))
    assert where_raised(caught.value).endswith(" in aten.mm.default)")


def test_an_error_that_was_never_raised_has_no_place() -> None:
    assert where_raised(ValueError()) == "an unknown place"


def test_the_place_of_a_thread_is_where_it_waits() -> None:
    with waiting_thread() as thread:
        assert thread.ident is not None
        assert re.match(r"distributed/test_watch.py:\d+ in wait_for \(inside ", where_now(thread.ident))
        assert "event.wait()" in stack_now(thread.ident)
    assert where_now(thread.ident) == "its end" and "has ended" in stack_now(thread.ident)


@contextlib.contextmanager
def watches(store: dist.Store, ranks: list[int], size: int) -> Iterator[list[Watch]]:
    """The watches of some ranks of a run."""
    made = [Watch(store, rank, size, timedelta(seconds=5)) for rank in ranks]
    try:
        yield made
    finally:
        for watch in made:
            watch.stop()


def raised(error: BaseException) -> BaseException:
    """The error, with a place."""
    with contextlib.suppress(BaseException):
        fail(error)()
    return error


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def test_a_roll_call_says_who_failed_and_where_the_others_are() -> None:
    with watches(dist.HashStore(), [0, 1, 2], 3) as (first, second, _):
        error, later = raised(ValueError("poisoned sample")), raised(RuntimeError("closed by peer"))
        second.failed(error)
        first.failed(later)
        assert notes(error) == notes(later), "one roll call serves all ranks"
    title, failed, *alive = notes(error).splitlines()
    assert title == "fxshard.distributed: roll call of the ranks"
    assert re.match(r"  rank 1 failed first, at distributed/outcomes.py:\d+ in raise_it: ValueError: poisoned", failed)
    assert [line[: line.index(", at")] for line in alive] == ["  rank 0 is alive", "  rank 2 is alive"]


def test_a_rank_that_is_gone_gives_no_answer() -> None:
    with watches(dist.HashStore(), [0, 1], 3) as (first, _):
        error = raised(RuntimeError("closed by peer"))
        first.failed(error)
    assert notes(error).splitlines()[1].startswith("  rank 2 gives no answer within 2 s: its process is gone")


def test_the_end_of_a_run_has_a_roll_call_of_its_own() -> None:
    with watches(dist.HashStore(), [0, 1], 2) as (first, _):
        first.leaves("by SystemExit(5)")
        assert "rank 0 left the run by SystemExit(5) and waits there for the others" in first.waited_in_vain()
        assert "rank 1 is alive, at" in first.waited_in_vain()


def test_a_rank_that_left_alone_and_is_gone_is_no_riddle() -> None:
    store, error = dist.HashStore(), raised(RuntimeError("timed out"))
    with watches(store, [0], 2) as (first,):
        with watches(store, [1], 2) as (second,):
            second.leaves("by SystemExit(5)")
        first.failed(error)
    assert notes(error).splitlines()[1] == "  rank 1 left the run by SystemExit(5), waited for the others, and ended"


def test_a_long_error_is_cut_in_a_roll_call_but_not_in_itself() -> None:
    with watches(dist.HashStore(), [0, 1], 2) as (first, _):
        error = raised(ValueError("\n".join(map(str, range(100)))))
        first.failed(error)
    assert "\n    11\n    ...\n" in notes(error) and "\n    12\n" not in notes(error) and str(error).endswith("99")


def test_a_later_run_over_the_same_store_hears_nothing_of_an_earlier_one() -> None:
    store = dist.HashStore()
    for text in ("early", "late"):
        with watches(store, [0, 1], 2) as (first, _):
            error = raised(ValueError(text))
            first.failed(error)
        assert f"ValueError: {text}" in notes(error)


class GoneStore(dist.HashStore):
    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("connection reset")


def test_a_store_that_is_gone_is_said_and_keeps_no_rank_from_ending() -> None:
    with watches(dist.HashStore(), [0, 1], 2) as (first, _):
        error = raised(ValueError("v"))
        with replaced(first, "_store", GoneStore()):
            first.failed(error)
    assert "the store that ranks meet in is gone" in notes(error) and "connection reset" in notes(error)


def test_what_a_rank_heard_before_the_store_went_is_kept() -> None:
    with watches(dist.HashStore(), [0, 1], 2) as (first, second):
        first.failed(raised(ValueError("poisoned sample")))  # rank 0, which serves the store and ends now
        error = raised(RuntimeError("closed by peer"))
        with replaced(second, "_store", GoneStore()):
            second.failed(error)
    assert "the store that ranks meet in is gone" in notes(error)
    assert re.search(r"\n  rank 0 failed first, at .*: ValueError: poisoned sample$", notes(error))
