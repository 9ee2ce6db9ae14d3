"""LayoutTensor: the sharded parameter that users hold.

A ``DTensor`` of the full logical shape whose local part is this rank's rows of the flat shard of a bucket (see
``fxshard.cut``). Rows may be cut unevenly, some ranks may own none, and torch's own DTensor rules know no such cut:
they would take it for ``torch.chunk``'s and give wrong values without an error. So no DTensor rule is used here:

* element-wise ops between tensors of equal cut, and plain scalars, run on the local parts;
* reductions to a scalar reduce locally, then over the shard dim of the mesh (collective), and give plain tensors;
* ``full_tensor()`` (collective) gives the whole value;
* any other op raises ``NotImplementedError`` that names the op and ``full_tensor()``.

The rules are in ``layout_tensor_ops`` and ``layout_tensor_reductions``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from fxshard import _torch
from fxshard.cut import Cut, to_logical_form
from fxshard.layout_tensor_comm import gather_full, reduce_over

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""What runs instead of an op: called with the op, its args and its kwargs."""

RULES: dict[Any, Rule] = {}
"""From op overload to rule; filled when ``layout_tensor_ops`` is imported, which the first op does."""


class LayoutTensor(DTensor):
    """One sharded parameter, gradient or optimizer state. Make one with ``LayoutTensor.from_local_slab``.

    ``shape``, ``stride`` (contiguous) and ``numel`` are those of the full tensor; ``to_local()`` is this rank's part in
    logical dim order, a view of the flat shard. ``nn.Parameter(layout_tensor)`` gives a LayoutTensor that is also an
    ``nn.Parameter``. In-place ops write to the flat shard and raise its version counter.
    """

    __slots__ = ["_cut"]
    _cut: Cut

    def __new__(cls, *args: Any, **kwargs: Any) -> LayoutTensor:
        raise TypeError("LayoutTensor is not built directly; use LayoutTensor.from_local_slab(slab, cut)")

    @staticmethod
    def from_local_slab(slab: Tensor, cut: Cut, requires_grad: bool = False) -> LayoutTensor:
        """The LayoutTensor whose local part is ``slab``: this rank's rows in storage form, (rows, *rest), aliased.

        No collective. ``ValueError`` if the slab's shape is not what this rank owns by ``cut``.
        """
        local = to_logical_form(slab, cut.dim)
        if local.shape != cut.own_shape:
            raise ValueError(
                f"rank {cut.shard_rank} of {cut.shard_world} owns rows {_span(cut)} of a tensor of shape "
                f"{tuple(cut.shape)}, a part of shape {tuple(cut.own_shape)} (rows along dim {cut.dim}), but the slab "
                f"of shape {tuple(slab.shape)} holds a part of shape {tuple(local.shape)}"
            )
        return wrap(local.detach(), cut, requires_grad)

    @property
    def cut(self) -> Cut:
        """How this tensor is cut over the mesh."""
        return self._cut

    # ---- values --------------------------------------------------------------------------------------------------

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's part in logical dim order: ``cut.local_shape(cut.shard_rank)``, aliasing the flat shard.

        Differentiable; the gradient is taken as this rank's part of the gradient. No collective. ``grad_placements``
        other than the tensor's own raise ``NotImplementedError``.
        """
        if grad_placements is not None and tuple(grad_placements) != self._cut.placements:
            raise NotImplementedError(
                f"to_local of a LayoutTensor takes gradients of its own placements {self._cut.placements}, not "
                f"{tuple(grad_placements)}; use full_tensor(grad_placements=...)"
            )
        if torch.is_grad_enabled() and self.requires_grad:
            return _ToLocal.apply(self)
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole tensor, contiguous, in memory of its own. Collective over the shard dim of the mesh.

        Differentiable. ``grad_placements`` says what the gradient of the result is on each dim of the mesh:
        ``Replicate()`` (the default; every rank has the same gradient) or ``Partial()`` (gradients of the ranks add up,
        or average with ``Partial("avg")``; one all-reduce per such dim, forward and backward are collective then).
        ``ValueError`` for anything else.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            return _FullTensor.apply(self, _checked_grad_placements(self._cut, grad_placements))
        return gather_full(self._local_tensor, self._cut)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """A plain replicated ``DTensor`` of the full value (collective), or this tensor for its own placements.

        ``NotImplementedError`` for other placements, another mesh, or a dtype.
        """
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise NotImplementedError(
                f"a LayoutTensor on {self.device_mesh} cannot be redistributed to {device_mesh}; use full_tensor() and "
                "torch.distributed.tensor.distribute_tensor"
            )
        if forward_dtype is not None or backward_dtype is not None:
            raise NotImplementedError("redistribute of a LayoutTensor changes no dtype; call .to(dtype) on the result")
        wanted = tuple(placements) if placements is not None else None
        if wanted == self._cut.placements:
            return self
        if wanted != (Replicate(),) * self.device_mesh.ndim:
            raise NotImplementedError(
                f"a LayoutTensor with placements {self._cut.placements} can be redistributed to Replicate() on every "
                f"mesh dim only, not to {wanted}; use full_tensor() and torch.distributed.tensor.distribute_tensor"
            )
        return DTensor.from_local(self.full_tensor(), self.device_mesh, wanted, run_check=False)

    # ---- copies --------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> LayoutTensor:
        """A copy with memory of its own for this rank's part, of the same cut. No collective."""
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only a leaf LayoutTensor can be copied deeply; call .detach() first")
        copied = wrap(self._local_tensor.detach().clone(), self._cut, self.requires_grad)
        memo[id(self)] = copied
        if self.grad is not None and not isinstance(self, nn.Parameter):  # a copied Parameter has no gradient, either
            copied.grad = copy.deepcopy(self.grad, memo)
        for name, value in self.__dict__.items():
            setattr(copied, name, copy.deepcopy(value, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            f"a LayoutTensor ({_span(self._cut)} of {self._cut.row_count} rows are on this rank) cannot be pickled or "
            "saved by torch.save: the file would hold one rank's rows. Save with torch.distributed.checkpoint or "
            "fxshard.checkpoint.save, or save full_tensor()"
        )

    @property
    def data(self) -> LayoutTensor:  # type: ignore[override]
        """This tensor without autograd, aliasing it. Assigning replaces the local part by that of a like tensor."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Tensor) -> None:
        if type(value) is not LayoutTensor or value._cut != self._cut:
            raise TypeError(
                f".data of {self._describe()} can only be replaced by a LayoutTensor of the same cut, not by "
                f"{_describe(value)}; under torch.no_grad(), param.copy_(full) takes a full tensor"
            )
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._local_tensor, self._spec = value._local_tensor, value._spec

    # ---- text ----------------------------------------------------------------------------------------------------

    def _describe(self) -> str:
        cut = self._cut
        names = cut.mesh.mesh_dim_names or ("replicate", "shard")[-cut.mesh.ndim :]
        mesh = ", ".join(f"{name} {size}" for name, size in zip(names, cut.mesh.shape, strict=True))
        rows = f"rows {_span(cut)} of {cut.row_count}" + (f" along dim {cut.dim}" if cut.dim else "")
        dtype = str(self.dtype).removeprefix("torch.")
        return f"LayoutTensor({rows}, shape={tuple(self.shape)}, dtype={dtype}, device={self.device}, mesh=({mesh}))"

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Text with this rank's rows only: printing is no collective."""
        kind = "Parameter containing:\n" if getattr(self, "_is_param", False) else ""
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{kind}{self._describe()[:-1]}{grad}, local={self._local_tensor.detach()})"

    # ---- torch's protocols ---------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        rule = RULES.get(func)
        if rule is None:
            rule = _rule_for(func, args, kwargs)
        return rule(func, args, kwargs or {})

    @property
    def __tensor_flatten__(self) -> Callable[[], tuple[list[str], Any]]:  # type: ignore[override]
        """The local part and the rest, which ``Module.to`` asks for. Not there for a tracer.

        Dynamo would trace any DTensor subclass as a DTensor, guarding on its placements alone, which do not tell cuts
        apart. Without this it breaks the graph at an op on a LayoutTensor and the op runs as always.
        """
        if _torch.is_tracing():
            raise AttributeError("a LayoutTensor cannot be traced into a graph")
        return lambda: (["_local_tensor"], (self._cut, self.requires_grad))

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> LayoutTensor:
        cut, requires_grad = flatten_spec
        return wrap(inner_tensors["_local_tensor"], cut, requires_grad)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        from fxshard.layout_tensor_checkpoint import write_items

        return write_items(fqn, self)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from fxshard.layout_tensor_checkpoint import chunks

        return chunks(self._cut)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        from fxshard.layout_tensor_checkpoint import shard_at

        return shard_at(self, index)


def wrap(local: Tensor, cut: Cut, requires_grad: bool = False) -> LayoutTensor:
    """The LayoutTensor around ``local`` (logical dim order), which must have shape ``cut.own_shape``; aliases it."""
    tensor = _torch.new_dtensor(LayoutTensor, local, _spec(cut, local.dtype), requires_grad)
    tensor._cut = cut
    return tensor


def _spec(cut: Cut, dtype: torch.dtype) -> Any:
    """The DTensorSpec of a cut and dtype, kept on the cut: wrapping a result must be cheap."""
    cache = cut.__dict__.setdefault("_specs", {})
    spec = cache.get(dtype)
    if spec is None:
        spec = cache[dtype] = _torch.dtensor_spec(cut.mesh, cut.placements, cut.shape, dtype)
    return spec


def _span(cut: Cut) -> str:
    start, count = cut.own_rows
    return f"{start}:{start + count}"


def _describe(value: Any) -> str:
    if isinstance(value, LayoutTensor):
        return value._describe()
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _rule_for(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Rule:
    """The rule of an op that the table did not have: loads the rules the first time, raises for unknown ops."""
    if not RULES:
        from fxshard import layout_tensor_ops, layout_tensor_reductions

        layout_tensor_ops.register(RULES)
        layout_tensor_reductions.register(RULES)
        _torch.keep_dynamo_out(
            [f"fxshard.layout_tensor{part}" for part in ("", "_ops", "_reductions", "_comm")] + ["fxshard.cut"]
        )
    rule = RULES.get(func)
    if rule is None:
        raise NotImplementedError(refusal(func, args, kwargs or {}))
    return rule


def refusal(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None, because: str = "") -> str:
    """The message of an op that has no right local form, naming the op, its tensors and the way out."""
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    tensors = "; ".join(_describe(leaf) for leaf in leaves[:8] if isinstance(leaf, Tensor))
    reason = because or "it needs rows of other ranks, or is not known to work on the rows of one rank"
    return (
        f"{func} does not work on sharded tensors: {reason}. It got {tensors}. Use full_tensor() (collective over the "
        "shard dim) to work on the whole value, and copy_ to write a full value back"
    )


def _checked_grad_placements(cut: Cut, grad_placements: Sequence[Placement] | None) -> tuple[Placement, ...]:
    wanted = tuple(grad_placements) if grad_placements is not None else (Replicate(),) * cut.mesh.ndim
    if len(wanted) != cut.mesh.ndim or not all(isinstance(p, Replicate | Partial) for p in wanted):
        raise ValueError(
            f"grad_placements of full_tensor names Replicate() or Partial() for each of the {cut.mesh.ndim} dims of "
            f"the mesh, not {wanted}"
        )
    return wanted


class _ToLocal(torch.autograd.Function):
    """LayoutTensor to its local part; the gradient is wrapped with the same cut."""

    @staticmethod
    def forward(ctx: Any, tensor: LayoutTensor) -> Tensor:  # type: ignore[override]
        ctx.cut = tensor._cut
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> LayoutTensor:  # type: ignore[override]
        return wrap(like_slab(grad, ctx.cut), ctx.cut)


class _FullTensor(torch.autograd.Function):
    """LayoutTensor to the full tensor; backward reduces where gradients are partial and keeps this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: LayoutTensor, grad_placements: tuple[Placement, ...]) -> Tensor:  # type: ignore[override]
        ctx.cut, ctx.grad_placements = tensor._cut, grad_placements
        return gather_full(tensor._local_tensor, tensor._cut)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[LayoutTensor, None]:  # type: ignore[override]
        for dim, placement in enumerate(ctx.grad_placements):
            if isinstance(placement, Partial):
                grad = reduce_over(grad, placement.reduce_op, ctx.cut.mesh, dim)
        return wrap(like_slab(ctx.cut.own_part(grad), ctx.cut), ctx.cut), None


def like_slab(local: Tensor, cut: Cut) -> Tensor:
    """``local`` (logical order) in memory of its own laid out as a slab: contiguous in storage form."""
    stored = local.movedim(cut.dim, 0).clone(memory_format=torch.contiguous_format)
    return to_logical_form(stored, cut.dim)


_torch.allow_foreach(LayoutTensor)
