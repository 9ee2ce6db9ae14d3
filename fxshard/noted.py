"""Whose gradients are on their way from a backward graph to the flat shard, for each backward apart."""

from __future__ import annotations

from collections.abc import Iterable

from fxshard import _torch


class Noted:
    """Parameter ids, noted while a backward runs and taken when autograd accumulates what that backward computed.

    A backward may run inside another (reentrant checkpointing). Autograd adds up the gradients of each by itself, so
    the inner one must not take what the outer one has noted and has yet to add up.
    """

    def __init__(self) -> None:
        self._ids: dict[int, set[int]] = {}

    def add(self, ids: Iterable[int]) -> None:
        """Note ``ids`` in the backward that is running."""
        self._ids.setdefault(_torch.current_backward(), set()).update(ids)

    def take(self) -> set[int]:
        """What was noted in the backward that is running, and forget it."""
        return self._ids.pop(_torch.current_backward(), set())
