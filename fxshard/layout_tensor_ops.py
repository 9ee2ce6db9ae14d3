"""Rules of LayoutTensor for ops that never need another rank: element-wise, multi-tensor, factories, copies.

Each rule is looked up by op overload (``LayoutTensor.__torch_dispatch__``). It unwraps local parts, runs the op on them
and wraps what is new with the same cut. Optimizers call these rules hundreds of times a step, so they walk their
arguments by hand. Which ops are element-wise is listed here by name: torch's ``pointwise`` tag also marks ``equal``.

What may stand beside a LayoutTensor in an element-wise op: a LayoutTensor of equal cut, a plain tensor of one element,
or a plain expanded scalar of the full shape (as autograd makes in the backward of ``sum``). Plain values must be the
same on every rank, as everywhere in SPMD code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fxshard.cut import Cut
from fxshard.layout_tensor import LayoutTensor, Rule, like_slab, refusal, wrap
from fxshard.layout_tensor_comm import full_value, generator_of_first_rank

aten = torch.ops.aten

# Element-wise ops by base name; the in-place form `name_` and the `out=` overloads come with each.
# fmt: off
_ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "addcdiv", "addcmul", "angle", "asin", "asinh", "atan", "atan2", "atanh",
    "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "ceil",
    "clamp", "clamp_max", "clamp_min", "conj_physical", "copysign", "cos", "cosh", "deg2rad", "digamma", "div",
    "elu", "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "floor_divide", "fmax", "fmin", "fmod",
    "frac", "ge", "gelu", "gt", "hardtanh", "heaviside", "hypot", "isfinite", "isinf", "isnan", "isneginf",
    "isposinf", "le", "leaky_relu", "lerp", "lgamma", "log", "log10", "log1p", "log2", "logaddexp", "logical_and",
    "logical_not", "logical_or", "logical_xor", "logit", "lt", "masked_fill", "maximum", "minimum", "mul",
    "nan_to_num", "ne", "neg", "nextafter", "positive", "pow", "rad2deg", "reciprocal", "relu", "remainder",
    "round", "rsqrt", "rsub", "sgn", "sigmoid", "sign", "signbit", "silu", "sin", "sinc", "sinh", "softplus",
    "sqrt", "square", "sub", "tan", "tanh", "threshold", "trunc", "where", "xlogy", "sigmoid_backward",
    "tanh_backward", "threshold_backward",
)
# fmt: on

_INPLACE_ONLY = ("fill_", "zero_")

# Overloads of the packets above that are no map over elements.
_EXCEPT = {"where.default"}

# Element-wise multi-tensor ops `_foreach_name`, each with its in-place form.
# fmt: off
_FOREACH = (
    "abs", "acos", "add", "addcdiv", "addcmul", "asin", "atan", "ceil", "clamp_max", "clamp_min", "clone", "copy",
    "cos", "cosh", "div", "erf", "erfc", "exp", "expm1", "floor", "frac", "lerp", "lgamma", "log", "log10", "log1p",
    "log2", "maximum", "minimum", "mul", "neg", "pow", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin",
    "sinh", "sqrt", "sub", "tan", "tanh", "trunc", "zero",
)
# fmt: on

# fmt: off
_RANDOM = (
    "normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_", "bernoulli_",
    "rand_like", "randn_like", "randint_like",
)
# fmt: on

_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


# ---- arguments -----------------------------------------------------------------------------------------------------


def local_operand(func: Any, value: Any, cut: Cut, args: Any) -> Any:
    """``value`` as an operand beside local parts of ``cut``; raises for a tensor that has no place there."""
    if type(value) is LayoutTensor:
        if value._cut is not cut and value._cut != cut:
            raise NotImplementedError(refusal(func, args, because="its sharded tensors are cut differently"))
        return value._local_tensor
    if not isinstance(value, Tensor):
        if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            raise NotImplementedError(refusal(func, args))
        return value
    if not isinstance(value, DTensor):
        if value.numel() == 1 and value.dim() <= len(cut.shape):
            return value
        if value.shape == cut.shape and not any(value.stride()):
            return cut.own_part(value)
    raise NotImplementedError(
        refusal(func, args, because="it mixes a sharded tensor with a tensor that is not sharded in the same way")
    )


def _first_cut(func: Any, args: Iterable[Any], whole: Any) -> Cut:
    for value in args:
        if type(value) is LayoutTensor:
            return value._cut
    raise NotImplementedError(refusal(func, whole))


def note_writes(locals_: Iterable[Tensor]) -> None:
    """Raise the version counters of local parts that were written to, and so those of the flat shards.

    Ops called below autograd do not do it; without it, autograd would miss that a saved flat shard has changed.
    """
    increment_version([t for t in locals_ if not t.is_inference()])


# ---- element-wise --------------------------------------------------------------------------------------------------


def _inplace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.op_(...)``: run on the local part of ``x``, which stays the view of the flat shard that it is."""
    target = args[0]
    if type(target) is not LayoutTensor:
        raise NotImplementedError(
            refusal(func, args, kwargs, because="a plain tensor would be written from one rank's rows")
        )
    cut, local = target._cut, target._local_tensor
    operands = [local_operand(func, value, cut, args) for value in args[1:]]
    if kwargs:
        kwargs = {name: local_operand(func, value, cut, args) for name, value in kwargs.items()}
    func(local, *operands, **kwargs)
    note_writes([local])
    return target


def _functional(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``op(x, ...)``: run on local parts and wrap the result, which may have another dtype."""
    cut = _first_cut(func, (*args, *kwargs.values()), args)
    operands = [local_operand(func, value, cut, args) for value in args]
    if kwargs:
        kwargs = {name: local_operand(func, value, cut, args) for name, value in kwargs.items()}
    return wrap(func(*operands, **kwargs), cut)


def _into_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``op(x, ..., out=y)`` where ``y`` is sharded too."""
    out = kwargs.get("out")
    if type(out) is not LayoutTensor or not any(type(value) is LayoutTensor for value in args):
        raise NotImplementedError(
            refusal(func, args, kwargs, because="out= and at least one input must be sharded in the same way")
        )
    cut, local = out._cut, out._local_tensor
    operands = [local_operand(func, value, cut, args) for value in args]
    kwargs = {name: local_operand(func, value, cut, args) for name, value in kwargs.items()}
    func(*operands, **kwargs)
    note_writes([local])
    return out


# ---- lists of tensors ----------------------------------------------------------------------------------------------


def local_lists(func: Any, args: Iterable[Any]) -> tuple[list[Any], list[Cut | None]]:
    """Arguments of a multi-tensor op with every list unwrapped, and one cut per position (None where all are plain).

    Sharded and plain tensors may mix along a list, but at one position all lists agree on the cut, except for plain
    tensors of one element (step counters).
    """
    cuts: list[Cut | None] | None = None
    unwrapped: list[Any] = []
    for value in args:
        if type(value) is not list and type(value) is not tuple:
            if type(value) is LayoutTensor:
                raise NotImplementedError(refusal(func, (value,), because="it takes one tensor for a whole list"))
            unwrapped.append(value)
        elif not value or not isinstance(value[0], Tensor):
            unwrapped.append(value)
        elif cuts is None:
            cuts = [t._cut if type(t) is LayoutTensor else None for t in value]
            unwrapped.append([t if c is None else t._local_tensor for t, c in zip(value, cuts, strict=True)])
        else:
            unwrapped.append(_beside(func, value, cuts))
    return unwrapped, cuts or []


def _beside(func: Any, tensors: Any, cuts: list[Cut | None]) -> list[Tensor]:
    """A further list of a multi-tensor op, unwrapped, each tensor checked against the cut at its position."""
    result = []
    for t, cut in zip(tensors, cuts, strict=True):
        if type(t) is LayoutTensor:
            if t._cut is not cut and t._cut != cut:
                raise NotImplementedError(refusal(func, (t,), because="its lists are cut differently at one position"))
            result.append(t._local_tensor)
        else:
            result.append(t if cut is None else local_operand(func, t, cut, (t,)))
    return result


def _foreach_inplace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    unwrapped, _ = local_lists(func, args)
    func(*unwrapped, **kwargs)
    note_writes(unwrapped[0])


def _foreach_functional(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    unwrapped, cuts = local_lists(func, args)
    results = func(*unwrapped, **kwargs)
    return [r if cut is None else wrap(r, cut) for r, cut in zip(results, cuts, strict=True)]


def _fused_optimizer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A fused optimizer step, which writes parameters, states, step counters and, with a gradient scale, gradients."""
    unwrapped, _ = local_lists(func, args)
    func(*unwrapped, **kwargs)
    for tensors in unwrapped:
        if isinstance(tensors, list):
            note_writes(tensors)


# ---- factories and copies ------------------------------------------------------------------------------------------


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayoutTensor:
    """``detach`` and ``alias``: the same local part."""
    source = args[0]
    if torch.is_inference_mode_enabled() and not source.is_inference():
        # Autograd gives the alias its source's version counter, which a tensor made in inference mode cannot have.
        with torch.inference_mode(False):
            return wrap(source._local_tensor, source._cut)
    return wrap(source._local_tensor, source._cut)


def _ask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A question about memory, answered by the local part."""
    return func(args[0]._local_tensor, *args[1:], **kwargs)


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayoutTensor:
    """``zeros_like`` and its kin, ``clone``, ``_to_copy``: local parts keep the slab's memory order."""
    source = args[0]
    if type(source) is not LayoutTensor:
        raise NotImplementedError(refusal(func, args, kwargs))
    memory_format = kwargs.pop("memory_format", None)
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise NotImplementedError(refusal(func, args, because=f"shards have no memory format {memory_format}"))
    return wrap(func(source._local_tensor, *args[1:], **kwargs), source._cut)


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``x.new_zeros(size)`` and its kin: sharded like ``x`` for the shape of ``x``.

    Another shape gives a plain tensor where the values are known, so that all ranks have the same.
    """
    source, size = args[0], tuple(args[1])
    cut = source._cut
    if size == tuple(cut.shape):
        stored = source._local_tensor.new_empty((cut.own_rows[1], *cut.storage_shape[1:]), **kwargs)
        local = stored.movedim(0, cut.dim)
        values = {aten.new_zeros: (0,), aten.new_ones: (1,), aten.new_full: args[2:]}.get(func.overloadpacket)
        return wrap(local if values is None else local.fill_(*values), cut)
    if func.overloadpacket in (aten.new_empty, aten.new_empty_strided):
        raise NotImplementedError(
            refusal(func, args, because=f"uninitialised memory of another shape {size} would differ between ranks")
        )
    return func(source._local_tensor, *args[1:], **kwargs)


def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.copy_(y)``: ``y`` of equal cut, of one element, or of the full shape: plain and equal on all ranks, or a
    DTensor, which is collective over its mesh."""
    target, source = args[0], args[1]
    if type(target) is not LayoutTensor:
        raise NotImplementedError(
            refusal(func, args, kwargs, because="a plain tensor would be written from one rank's rows")
        )
    if isinstance(source, DTensor) and type(source) is not LayoutTensor and source.shape == target.shape:
        value = full_value(source, target._cut.mesh)
        if value is None:
            because = "parts of the DTensor are not those of torch.chunk"
            raise NotImplementedError(refusal(func, args, kwargs, because=because))
        source = value
    if not isinstance(source, DTensor) and source.shape == target.shape:
        source = target._cut.own_part(source)
        target._local_tensor.copy_(source, *args[2:], **kwargs)
        note_writes([target._local_tensor])
        return target
    return _inplace(func, args, kwargs)


def _put_where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[mask] = value``: a sharded bool mask of equal cut and one value."""
    target, indices, value, *rest = args
    mask = indices[0]
    if not (type(target) is type(mask) is LayoutTensor and len(indices) == 1 and mask.dtype == torch.bool) or (
        value.numel() != 1 or any(rest) or any(kwargs.values())
    ):
        reason = "of x[index] = value, only one value at a sharded mask works"
        raise NotImplementedError(refusal(func, args, kwargs, because=reason))
    _inplace(aten.masked_fill_.Tensor, (target, mask, value.reshape(())), {})
    return target


# ---- random numbers ------------------------------------------------------------------------------------------------


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayoutTensor:
    """In-place and ``*_like`` random ops: the rows of what the op gives on the unsharded tensor.

    Every rank draws the full tensor, from the generator state of the mesh's first rank (collective over the mesh), so
    the values do not depend on the cut, and replicas agree. A rank whose generator was in another state keeps it.
    """
    target = args[0]
    others = (*args[1:], *kwargs.values())
    if type(target) is not LayoutTensor or any(isinstance(value, Tensor) for value in others):
        raise NotImplementedError(refusal(func, args, kwargs))
    cut, local = target._cut, target._local_tensor
    if kwargs.get("device") not in (None, local.device):
        raise NotImplementedError(refusal(func, args, because="it draws on another device than the tensor's"))
    full = local.new_empty(cut.shape)
    with generator_of_first_rank(kwargs.get("generator"), local.device, cut.mesh):
        drawn = func(full, *args[1:], **kwargs)
    if drawn is not full:
        return wrap(like_slab(cut.own_part(drawn), cut), cut)
    local.copy_(cut.own_part(drawn))
    note_writes([local])
    return target


# ---- the table -----------------------------------------------------------------------------------------------------


def _overloads(name: str) -> Iterator[Any]:
    """The overloads of an aten op by base name that take a tensor; nothing if this torch has no such op."""
    packet = getattr(aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        func = getattr(packet, overload)
        if f"{name}.{overload}" not in _EXCEPT and any("Tensor" in str(a.type) for a in func._schema.arguments):
            yield func


def register(rules: dict[Any, Rule]) -> None:
    """Enter the rules of this module into the table."""

    def enter(names: Iterable[str], rule: Rule, out: Rule | None = None) -> None:
        for name in names:
            for func in _overloads(name):
                if not any(a.is_out for a in func._schema.arguments):
                    rules[func] = rule
                elif out is not None and len(func._schema.returns) == 1:
                    rules[func] = out

    enter(_ELEMENTWISE, _functional, out=_into_out)
    enter((f"{name}_" for name in _ELEMENTWISE), _inplace)
    enter(_INPLACE_ONLY, _inplace)
    enter((f"_foreach_{name}" for name in _FOREACH), _foreach_functional)
    enter((f"_foreach_{name}_" for name in _FOREACH), _foreach_inplace)
    enter(_FUSED, _fused_optimizer)
    enter(("detach", "alias", "lift_fresh"), _alias)
    enter(("is_pinned",), _ask)
    enter(("clone", "_to_copy", "_pin_memory", "zeros_like", "ones_like", "empty_like", "full_like"), _like)
    enter(("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"), _new)
    enter(_RANDOM, _random)
    rules[aten.max.other] = rules[aten.min.other] = _functional
    rules[aten.copy_.default] = _copy_
    rules[aten.index_put_.default] = _put_where
