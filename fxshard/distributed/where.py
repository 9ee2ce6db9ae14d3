"""Where a rank is, in words: the user's line, and what it waits in."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from types import FrameType

import torch

_LIBRARIES = tuple(
    os.path.abspath(folder) + os.sep
    for folder in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(__file__)),
    )
)


def where_raised(error: BaseException) -> str:
    """The place that `error` came from."""
    return _place(list(traceback.walk_tb(error.__traceback__)))


def where_now(thread: int) -> str:
    """The place that the thread with this identity is at."""
    frame = sys._current_frames().get(thread)
    return _place(list(traceback.walk_stack(frame))[::-1]) if frame is not None else "its end"


def stack_now(thread: int) -> str:
    """The Python stack of the thread with this identity, outermost frame first."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else "  the thread has ended\n"


def _place(frames: list[tuple[FrameType, int]]) -> str:
    """`frames` with their line numbers, outermost first, as "file:line in function (inside ...)"."""
    if not frames:
        return "an unknown place"
    users = [each for each in frames if _is_users(each[0])]
    here = users[-1] if users else frames[-1]
    return _line(*here) + (f" (inside {_line(*frames[-1])})" if here is not frames[-1] else "")


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(("<", *_LIBRARIES))


def _line(frame: FrameType, number: int) -> str:
    folder, file = os.path.split(frame.f_code.co_filename)
    name, op = frame.f_code.co_name, frame.f_locals.get("self")
    if isinstance(op, torch._ops.OperatorBase | torch._ops.OpOverloadPacket):
        name = str(op)  # which op, wait_tensor for example
    return f"{os.path.join(os.path.basename(folder), file)}:{number} in {name}"
