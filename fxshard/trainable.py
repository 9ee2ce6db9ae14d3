"""Freezing and unfreezing after sharding.

The flat shard is what autograd and compiled graphs see, and ``requires_grad`` is set on the parameters that users hold.
So each of those knows its bucket, and setting the flag on it tells the bucket at once: before the next forward checks
its guards.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxshard.layout_tensor import LayoutTensor

if TYPE_CHECKING:
    from fxshard.bucket import ParamBucket

_ATTRIBUTE = "_fxshard_place"


class Place:
    """Which bucket a LayoutTensor is a parameter of. A copy of the tensor is a parameter of none."""

    def __init__(self, bucket: ParamBucket | None) -> None:
        self._bucket = weakref.ref(bucket) if bucket is not None else None

    @property
    def bucket(self) -> ParamBucket | None:
        return self._bucket() if self._bucket is not None else None

    def __deepcopy__(self, memo: dict[int, object]) -> Place:
        return Place(None)

    @staticmethod
    def of(tensor: Tensor) -> ParamBucket | None:
        """The bucket of which ``tensor`` is a parameter, if any."""
        place = tensor.__dict__.get(_ATTRIBUTE)
        return place.bucket if place is not None else None

    @staticmethod
    def set(param: Tensor, bucket: ParamBucket) -> None:
        setattr(param, _ATTRIBUTE, Place(bucket))


def _requires_grad_(self: LayoutTensor, requires_grad: bool = True) -> LayoutTensor:
    """``Tensor.requires_grad_``; the bucket of a parameter follows."""
    self.requires_grad = requires_grad
    return self


def _set_requires_grad(self: LayoutTensor, requires_grad: bool) -> None:
    torch._C.TensorBase.requires_grad.__set__(self, requires_grad)  # type: ignore[attr-defined]
    bucket = Place.of(self)
    if bucket is not None:
        bucket.follow_requires_grad()


LayoutTensor.requires_grad_ = _requires_grad_  # type: ignore[method-assign,assignment]
LayoutTensor.requires_grad = property(  # type: ignore[assignment]
    lambda self: torch._C.TensorBase.requires_grad.__get__(self),  # type: ignore[attr-defined]
    _set_requires_grad,
)
