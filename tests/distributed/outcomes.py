"""How a call ended, as data that a worker can return."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist


def outcome(fn: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """("value", what `fn` returned), or (exception type, message), or ("SystemExit", code)."""
    try:
        return "value", fn(*args)
    except SystemExit as error:
        return "SystemExit", error.code
    except BaseException as error:
        return type(error).__name__, str(error)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside; for workers, which have no monkeypatch fixture."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def on_rank(which: int, here: Callable[[], Any], elsewhere: Callable[[], Any]) -> Callable[[], Any]:
    """`here` on global rank `which`, `elsewhere` on the others."""
    return here if dist.get_rank() == which else elsewhere


def fail(error: BaseException) -> Callable[[], Any]:
    """A callable that raises `error`."""

    def raise_it() -> Any:
        raise error

    return raise_it
