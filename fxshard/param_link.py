"""What the parameters that users hold tell their bucket, at once: that they were frozen, or given other data.

The flat shard is what autograd and compiled graphs see. Both have to know before the next forward, and compiled code
checks its guards before any of our code runs; so the bucket cannot find out by looking.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fxshard.layout_tensor import LayoutTensor

if TYPE_CHECKING:
    from fxshard.bucket import ParamBucket

_ATTRIBUTE = "_fxshard_link"


class ParamLink:
    """Which bucket a LayoutTensor is a parameter of. A copy of the tensor is a parameter of none."""

    def __init__(self, bucket: ParamBucket | None) -> None:
        self._bucket = weakref.ref(bucket) if bucket is not None else None

    def __deepcopy__(self, memo: dict[int, object]) -> ParamLink:
        return ParamLink(None)

    @staticmethod
    def set(param: Tensor, bucket: ParamBucket) -> None:
        """``param`` is a parameter of ``bucket`` from now on."""
        setattr(param, _ATTRIBUTE, ParamLink(bucket))

    @staticmethod
    def bucket_of(tensor: Tensor) -> ParamBucket | None:
        """The bucket of which ``tensor`` is a parameter, if any."""
        link = tensor.__dict__.get(_ATTRIBUTE)
        return link._bucket() if link is not None and link._bucket is not None else None


def _requires_grad_(self: LayoutTensor, requires_grad: bool = True) -> LayoutTensor:
    """``Tensor.requires_grad_``; the bucket of a parameter follows."""
    self.requires_grad = requires_grad
    return self


def _set_requires_grad(self: LayoutTensor, requires_grad: bool) -> None:
    torch._C.TensorBase.requires_grad.__set__(self, requires_grad)  # type: ignore[attr-defined]
    bucket = ParamLink.bucket_of(self)
    if bucket is not None:
        bucket.follow_requires_grad()


_plain_data: property = LayoutTensor.data  # type: ignore[assignment]


def _set_data(self: LayoutTensor, value: Tensor) -> None:
    _plain_data.__set__(self, value)
    bucket = ParamLink.bucket_of(self)
    if bucket is not None:
        bucket.take_values(self)


LayoutTensor.requires_grad_ = _requires_grad_  # type: ignore[method-assign,assignment]
LayoutTensor.requires_grad = property(  # type: ignore[assignment]
    lambda self: torch._C.TensorBase.requires_grad.__get__(self),  # type: ignore[attr-defined]
    _set_requires_grad,
)
LayoutTensor.data = property(_plain_data.fget, _set_data, doc=_plain_data.__doc__)  # type: ignore[assignment]
