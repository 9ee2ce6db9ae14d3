"""What becomes of the full parameters that sharded ones replaced.

Whoever took them before sharding (an optimizer, a list of a user's) would go on with tensors that no forward reads. So
they give up their memory, and any use of them raises.
"""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import torch
from torch import nn


class ReplacedParameter(nn.Parameter):
    """A full parameter from before sharding. It can be compared by identity, and nothing else."""

    _fxshard_name: str

    @staticmethod
    def retire(param: nn.Parameter, name: str) -> None:
        """Turn ``param`` into one. Parameters of a class of their own whose memory layout differs stay as they are."""
        empty = torch.empty(0, dtype=param.dtype, device=param.device)
        with contextlib.suppress(TypeError):
            param.__class__ = ReplacedParameter
            with torch._C.DisableTorchFunctionSubclass():
                param.data, param.grad = empty, None
            param._fxshard_name = name  # type: ignore[attr-defined]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        names = sorted({leaf._fxshard_name for leaf in leaves if isinstance(leaf, ReplacedParameter)})
        raise RuntimeError(
            f"parameter {names[0] if names else ''!r} was sharded since it was taken from the model, so this full "
            "tensor is no longer part of it. Build the optimizer, and whatever else holds parameters, after "
            "fully_shard/shard, from model.parameters() of the sharded model; a module that shares the weight has to "
            "be sharded as well"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ReplacedParameter({self._fxshard_name!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacedParameter:
        return self
