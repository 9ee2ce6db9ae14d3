"""Collectives that run a callable and leave no rank waiting because a peer's callable failed.

Both are for values that ranks computing them alone could disagree on. They cannot help when a process disappears: on
gloo its peers get a `RuntimeError`, at once if it died and at the group's timeout if it never comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fxshard.distributed.codec import decode
from fxshard.distributed.envelope import Envelope, attempt, check_label
from fxshard.distributed.queries import check_group_of_launch, is_distributed_run, rank, size
from fxshard.distributed.transport import all_gather_bytes, broadcast_bytes

T = TypeVar("T")
R = TypeVar("R")


def broadcast_from(label: str, fn: Callable[[], T], src: int = 0) -> T:
    """The value of `fn()`, run on global rank `src` only, on every rank. Collective over the default group.

    Every rank, `src` included, returns its own copy with tensors on the CPU. A single process returns `fn()`'s object
    itself and encodes nothing. `label` and `src` must be the same on every rank.

    Raises, on every rank or on none: what `fn` raised, or the encoding error of a value that cannot be sent, on `src`
    and `RuntimeError` naming it on the others; `SystemExit` with the same code everywhere if `fn` raised one.
    Raises where it is seen: `RuntimeError` on a rank whose label differs from that of `src`; `ValueError` for a `src`
    outside the group and `RuntimeError` on a launch without a group, both before `fn` runs.
    """
    caller = f"broadcast_from({label!r})"
    label = check_label(label, "broadcast_from")
    check_group_of_launch(caller)
    if isinstance(src, bool) or not isinstance(src, int) or not 0 <= src < size():
        raise ValueError(f"{caller}: src must be a global rank from 0 to {size() - 1}, got {src!r}")
    if not is_distributed_run():
        return fn()

    if rank() == src:
        sent, failure = attempt(label, fn)
        broadcast_bytes(sent.pack(), src)
        if failure is not None:
            raise failure
        return decode(sent.payload)

    got = Envelope.unpack(broadcast_bytes(None, src))
    if got.label != label:
        raise RuntimeError(
            f"ranks are out of step: rank {rank()} is in {caller}, but rank {src} sent the value of {got.label!r}; "
            "every rank must make the same calls in the same order"
        )
    if got.status == "exit":
        raise SystemExit(got.exit_code)
    if got.status == "error":
        raise RuntimeError(f"{caller}: rank {src} failed with {got.detail}")
    return decode(got.payload)


def all_reduce(label: str, fn: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
    """`combine([v0, ..., vN-1])` on every rank, where `vi` is rank i's `fn()`. Collective over the default group.

    The list is equal on every rank: copies with tensors on the CPU. A single process gets `combine([fn()])` with the
    object itself. For example `combine=min` for a batch size that each rank's memory bounds.

    Raises, on every rank or on none: if some `fn` fails, or its value cannot be sent, its rank raises that error and
    every other rank a `RuntimeError` naming the first such rank. If all that happened is `SystemExit`, a rank that
    exited keeps its code and the others take the first exiter's. If labels differ, every rank raises a `RuntimeError`
    that lists them, whatever else happened; a rank's own error is its cause.
    Raises where it is seen: what `combine` raises; `RuntimeError` on a launch without a group, before `fn` runs.
    """
    caller = f"all_reduce({label!r})"
    label = check_label(label, "all_reduce")
    check_group_of_launch(caller)
    if not is_distributed_run():
        return combine([fn()])

    sent, failure = attempt(label, fn)
    got = [Envelope.unpack(data) for data in all_gather_bytes(sent.pack(), None)]
    _check_labels(got, failure)
    _raise_failures(caller, got, failure)
    values: list[Any] = [decode(each.payload) for each in got]
    return combine(values)


def _check_labels(got: list[Envelope], failure: BaseException | None) -> None:
    ranks_of: dict[str, list[int]] = {}
    for source, each in enumerate(got):
        ranks_of.setdefault(each.label, []).append(source)
    if len(ranks_of) > 1:
        brought = ", ".join(f"{label!r} by rank {ranks}" for label, ranks in ranks_of.items())
        raise RuntimeError(
            f"ranks are out of step in all_reduce, their labels differ: {brought}; every rank must make the same calls "
            "in the same order"
        ) from failure


def _raise_failures(caller: str, got: list[Envelope], failure: BaseException | None) -> None:
    """Raise what all_reduce's failure rules say for this rank, whose own failure is `failure`."""
    errors = [source for source, each in enumerate(got) if each.status == "error"]
    if errors:
        if rank() in errors and failure is not None:
            raise failure
        raise RuntimeError(f"{caller}: rank {errors[0]} failed with {got[errors[0]].detail}") from failure
    if failure is not None:
        raise failure
    for each in got:
        if each.status == "exit":
            raise SystemExit(each.exit_code)
