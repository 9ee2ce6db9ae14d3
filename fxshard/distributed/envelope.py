"""How one rank's callable ended, in a form that always reaches its peers.

A rank whose callable failed still sends: that is what keeps its peers from waiting for it. Exceptions cannot travel as
objects (decoding them would run code), so they travel as type name and message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fxshard.distributed.codec import decode, encode

_LENGTH = struct.Struct("<q")


@dataclass(frozen=True)
class Envelope:
    """label: what the caller called the exchange. detail: the error's text, or the exit code (None, int or str).

    payload: the encoded value, empty unless ok.
    """

    label: str
    status: Literal["ok", "error", "exit"]
    detail: int | str | None = None
    payload: bytes = b""

    def pack(self) -> bytes:
        """As bytes: the header's length (int64), the header, the payload."""
        header = encode((self.label, self.status, self.detail), self.label)
        return _LENGTH.pack(len(header)) + header + self.payload

    @staticmethod
    def unpack(data: bytes | bytearray) -> Envelope:
        """The envelope that `pack` wrote."""
        (length,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + length
        label, status, detail = decode(data[_LENGTH.size : start])
        return Envelope(label, status, detail, bytes(data[start:]))

    @property
    def exit_code(self) -> int | str | None:
        """The code of a rank that left by `SystemExit`."""
        return self.detail


def attempt(label: str, fn: Callable[[], Any]) -> tuple[Envelope, BaseException | None]:
    """Run `fn` and encode its value; the envelope to send, and the exception if either failed."""
    try:
        return Envelope(label, "ok", payload=encode(fn(), label)), None
    except SystemExit as error:
        return Envelope(label, "exit", _exit_code(error.code)), error
    except BaseException as error:  # KeyboardInterrupt too: the peers must hear of it before it goes on
        return Envelope(label, "error", describe(error)), error


def describe(error: BaseException) -> str:
    """Type name and message of `error`."""
    return f"{type(error).__name__}: {_text(error)}"


def check_label(label: str, caller: str) -> str:
    """`label` as a plain string; ValueError if it is none."""
    if not isinstance(label, str):
        raise ValueError(f"the label of {caller} must be a string, the same on every rank, got {label!r}")
    return str(label)


def _exit_code(code: object) -> int | str | None:
    if code is None or isinstance(code, int):
        return None if code is None else int(code)
    return _text(code)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # a broken __str__ must not keep the envelope from being sent
        return "(its text cannot be printed)"
