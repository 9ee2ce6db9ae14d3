"""Values as bytes that a peer can read without running code: `torch.save`, and `torch.load` with `weights_only=True`.

Plain data, dtypes and tensors pass. Classes of one's own pass once registered with
`torch.serialization.add_safe_globals` on every rank. A DTensor passes too, but arrives as the sender's shard: send its
local tensor instead.
"""

from __future__ import annotations

import io
import pickle
from types import ModuleType
from typing import Any

import torch


class _Pickler(pickle.Pickler):
    """`torch.save`'s pickler with two differences in what it writes."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        # Only plain tensors: a Parameter or a sparse tensor is written as plain tensors, which come by here in turn.
        if kind is torch.Tensor and obj.layout is torch.strided:
            return _reduce_view(obj)
        if issubclass(kind, dict) and kind.__init__ is dict.__init__ and kind.__reduce_ex__ is object.__reduce_ex__:
            # Item by item, weights_only would refuse it even when registered; as an argument it is a plain dict.
            return kind, (dict(obj),), obj.__reduce_ex__(2)[2]
        return NotImplemented


def _reduce_view(tensor: torch.Tensor) -> Any:
    """A tensor that views part of a larger storage is written as one of its own; others keep sharing storages.

    `torch.save` writes whole storages: a slice of two elements would carry the tensor that it was cut from.
    """
    if tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():
        return NotImplemented
    clone = tensor.detach().clone()
    clone.__dict__.update(tensor.__dict__)
    return clone.requires_grad_(tensor.requires_grad).__reduce_ex__(2)


_PICKLE = ModuleType("fxshard_codec_pickle")
_PICKLE.Pickler = _Pickler  # type: ignore[attr-defined]


def encode(value: Any, label: str) -> bytes:
    """`value` as bytes that `decode` accepts, checked by decoding them once.

    Raises what saving or loading raises if the value does not round-trip (`PicklingError`, `UnpicklingError`,
    `TypeError`, `AttributeError`, ...), with a note that names `label`.
    """
    try:
        stream = io.BytesIO()
        torch.save(value, stream, pickle_module=_PICKLE)
        data = stream.getvalue()
        decode(data)
    except Exception as error:
        error.add_note(
            f"the value of {label!r}, a {type(value).__name__}, cannot be sent to other ranks: send plain data and "
            "tensors, or register its class with torch.serialization.add_safe_globals on every rank"
        )
        raise
    return data


def decode(data: bytes | bytearray) -> Any:
    """The value in `data`, tensors on the CPU. Never runs code from `data`; `UnpicklingError` if it would have to."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
