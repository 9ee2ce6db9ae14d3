"""The demo's text, and the batches that are drawn from it."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

_ENOUGH = 4_000_000  # bytes; the demo looks at far fewer


def read_text(file: str | None = None) -> bytes:
    """The bytes of ``file``, or of the sources of Python's standard library: text that every machine has.

    ``FileNotFoundError`` where the library is not there as .py files, ``OSError`` for a file that cannot be read.
    """
    if file is not None:
        return Path(file).read_bytes()
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for source in sorted(folder.glob("*.py")):
        text += source.read_bytes()
        if len(text) >= _ENOUGH:
            break
    if not text:
        raise FileNotFoundError(f"no .py file in Python's standard library at {folder}; give a text with --text FILE")
    return bytes(text)


def batches(text: bytes, rows: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, targets), each int64 (rows, context) on the CPU; targets are the bytes that follow.

    Equal for equal arguments. ``ValueError`` for a text of fewer than ``context + 2`` bytes.
    """
    if len(text) < context + 2:
        raise ValueError(
            f"the text has {len(text)} bytes, but a row takes {context + 1} of it and rows start at several places; "
            "give a longer one"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    span = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (rows, 1), generator=generator)
        drawn = data[starts + span].long()
        yield drawn[:, :-1], drawn[:, 1:]
