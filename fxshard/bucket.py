"""ParamBucket: the parameters of a unit that share one collective, and the flat shard that stores them.

[Note: the four buffers of a bucket]
*flat shard*  this rank's segment of the bucket's GlobalLayout, 1-D, storage dtype. It is the autograd leaf and the
              all-gather input; the parameters that users hold are views of it.
*gathered*    all segments end to end, gather dtype: the global buffer itself. A full parameter is a contiguous view of
              it at its layout offset (for a cut along dim k > 0, a view with dim k moved back from the front).
*packed*      full gradients at the same offsets, zeros in the gaps, reduce dtype: the reduce-scatter input.
*grad segment*  this rank's segment of the reduced gradients, in which each ``.grad`` (storage dtype) or ``main_grad``
              (reduce dtype) is a view.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fxshard import registry
from fxshard.cut import Cut
from fxshard.layout import GlobalLayout, Range
from fxshard.layout_tensor import LayoutTensor
from fxshard.mesh import MeshGroups, MeshPart, part_of
from fxshard.noted import Noted
from fxshard.param_link import ParamLink
from fxshard.reduction import Reduction, Stage, plan_reduction
from fxshard.unreduced import Unreduced

if TYPE_CHECKING:
    from fxshard.unit import Unit


@dataclass(frozen=True)
class BucketDtypes:
    """``storage``: flat shard and ``.grad``; ``gather``: all-gather and full parameters; ``reduce``: reduce-scatter."""

    storage: torch.dtype
    gather: torch.dtype
    reduce: torch.dtype

    @staticmethod
    def of(storage: torch.dtype, policy: MixedPrecisionPolicy) -> BucketDtypes:
        """The policy's dtypes hold for floating-point parameters; others keep their own throughout."""
        if not storage.is_floating_point:
            return BucketDtypes(storage, storage, storage)
        gather = policy.param_dtype or storage
        return BucketDtypes(storage, gather, policy.reduce_dtype or gather)


@dataclass
class ParamSlot:
    """One parameter of a bucket: what users hold, how it is cut, and every (module, attribute) that reads it."""

    param: nn.Parameter
    cut: Cut
    owners: list[tuple[nn.Module, str]]
    name: str = ""  # fully qualified from the root that was sharded last; see sharding.name_units
    detached: bool = False  # frozen, in a bucket that is not: compiled reads record no gradient; they guard on this

    def full_view(self, stored: Tensor) -> Tensor:
        """The parameter in its logical shape, from its elements (any shape) in storage order."""
        return stored.view(self.cut.layout.tensor_shapes[self.cut.index]).movedim(0, self.cut.dim)


@dataclass(eq=False)
class ParamBucket:
    """See [Note: the four buffers of a bucket]. ``slots[i]`` is tensor id i of ``layout``."""

    slots: list[ParamSlot]
    layout: GlobalLayout
    dtypes: BucketDtypes
    groups: MeshGroups
    policy: MixedPrecisionPolicy
    flat: nn.Parameter
    offloaded_from: torch.device | None = None  # where it is gathered and reduced, if the flat shard rests elsewhere
    unit: Unit = field(init=False)  # set when the unit takes the bucket
    name: str = field(default="", init=False)  # canonical: the unit's name, and a number where it has several buckets
    key: str = field(init=False)
    reduction: Reduction = field(init=False)
    reduced: Noted = field(default_factory=Noted, init=False)  # ids whose gradient the running backward has reduced
    unreduced: Unreduced = field(init=False)
    _watched: nn.Parameter | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.unreduced = Unreduced(self)
        self.set_reduction()
        for slot in self.slots:
            if isinstance(slot.param, LayoutTensor):
                ParamLink.set(slot.param, self)
        self.follow_requires_grad()

    @property
    def requires_grad(self) -> bool:
        return self.flat.requires_grad

    @property
    def mesh(self) -> DeviceMesh:
        """Whose ranks share the bucket."""
        return self.slots[0].cut.mesh

    @property
    def device(self) -> torch.device:
        """Where the bucket is gathered and reduced."""
        return self.offloaded_from or self.flat.device

    def gather_input(self) -> Tensor:
        """The flat shard as it is sent: where the bucket is gathered, in the gather dtype, without a graph."""
        return self.flat.detach().to(self.device, self.dtypes.gather)

    @property
    def segment_size(self) -> int:
        """Elements of this rank's segment."""
        return self.flat.numel()

    @property
    def kept_part(self) -> MeshPart | None:
        """Who shares what is kept of the gathered buffer between forward and backward, if that is more than the
        segments: ``reshard_after_forward`` as a number of ranks."""
        size = self.unit.reshard_size
        if size is None or not self.unit.reshard_after_forward or size >= self.groups.shard_size:
            return None
        return part_of(self.mesh, size)

    def set_reduction(self, op: str = "avg", divide_factor: float | None = None) -> None:
        """Decide what divides gradients; see ``take_new_key``."""
        groups = self.groups
        self.reduction = plan_reduction(
            groups.shard_size, groups.replicate_size, self.dtypes.reduce, op, divide_factor
        )
        self.take_new_key()

    def take_new_key(self) -> None:
        """Be captured anew: compiled code guards on the key, and what holds of the bucket now is in graphs to come."""
        groups = self.groups
        stored = [(tuple(s.cut.storage_shape), s.cut.dim) for s in self.slots]
        sizes = (self.layout.size, self.segment_size, groups.shard_size, groups.replicate_size)
        graphs_depend_on = (self.dtypes, self.reduction, str(self.device), self.unreduced.may_wait)
        self.key = registry.register(self, (stored, tuple(self.layout.tensor_to_offset), sizes, graphs_depend_on))

    def gap_ranges(self) -> list[Range]:
        """The parts of the layout that belong to no tensor, ascending."""
        taken = sorted(
            (r for r in map(self.layout.get_tensor_range, range(len(self.slots))) if r.numel), key=lambda r: r.start
        )
        gaps, at = [], 0
        for r in taken:
            if r.start > at:
                gaps.append(Range(at, r.start - at))
            at = r.end
        if at < self.layout.size:
            gaps.append(Range(at, self.layout.size - at))
        return gaps

    # -- full parameters and packed gradients, for eager code; graphs do the same with nodes --------------------------

    def full_params(self, gathered: Tensor) -> list[Tensor]:
        """Every full parameter, as views of the gathered buffer."""
        ranges = map(self.layout.get_tensor_range, range(len(self.slots)))
        return [s.full_view(gathered[r.start : r.end]) for s, r in zip(self.slots, ranges, strict=True)]

    def pack(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The packed buffer of full gradients (None counts as zeros), reduce dtype, ``layout.size`` elements."""
        packed = torch.zeros(self.layout.size, dtype=self.dtypes.reduce, device=self.device)
        for view, grad in zip(self.full_params(packed), grads, strict=True):
            if grad is not None:
                view.copy_(grad)
        return packed

    # -- gradients ----------------------------------------------------------------------------------------------------

    def follow_requires_grad(self) -> None:
        """Let the flat shard require a gradient exactly if one of the parameters does; users freeze and unfreeze."""
        trainable = any(s.param.requires_grad for s in self.slots)
        if self.flat.requires_grad != trainable:
            self.flat.requires_grad_(trainable)
        if trainable and self._watched is not self.flat:
            self.flat.register_post_accumulate_grad_hook(lambda _: self._take_over())
            self._watched = self.flat
        for slot in self.slots:
            slot.detached = trainable and not slot.param.requires_grad

    def follow_main_grads(self) -> None:
        """Let gradients flow to a leaf of the reduce dtype, if the unit keeps them in it."""
        if self.unit.main_grads:
            self.unreduced.make_sinks(["main"])

    def note_reduced(self, ids: Iterable[int]) -> None:
        """Say which parameters the running backward gives a gradient: the others' ``.grad`` stays None."""
        self.reduced.add(ids)

    def note(self, stage: Stage, ids: Iterable[int]) -> None:
        """Say how far the running backward reduces gradients of parameters ``ids``."""
        if stage == "all":
            self.note_reduced(ids)
        else:
            self.unreduced.note(stage, ids)

    def _take_over(self) -> None:
        """Take the gradient of the flat shard, where autograd left it, and leave nothing there."""
        segment, self.flat.grad = self.flat.grad, None
        if segment is not None:
            self.unit.scope.note_segment(self, segment, self.reduced.take())

    def trainable(self) -> set[int]:
        """Parameters that get a gradient now."""
        return {i for i, s in enumerate(self.slots) if s.param.requires_grad}

    @property
    def grad_dtype(self) -> torch.dtype:
        """Of a grad segment, and so of what stages "all" and "main" of a reduction give."""
        return self.dtypes.reduce if self.unit.main_grads else self.dtypes.storage

    def give(self, segment: Tensor, ids: Iterable[int]) -> None:
        """Hand parameters ``ids`` their parts of a grad segment: assign or add, then run their hooks."""
        name = "main_grad" if self.unit.main_grads else "grad"
        present: list[Tensor] = []
        new: list[Tensor] = []
        params: list[nn.Parameter] = []
        for i in sorted(ids):
            param = self.slots[i].param
            grad: Tensor = self.local_view(segment, i)
            for hook in (param._backward_hooks or {}).values():
                replaced = hook(grad)
                grad = grad if replaced is None else replaced
            params.append(param)
            before: Tensor | None = getattr(param, name, None)
            if before is None:
                setattr(param, name, grad)
            else:
                present.append(before)
                new.append(grad)
        if present:
            torch._foreach_add_(present, new)
        for param in params:
            for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(param)

    # -- the views that users hold ------------------------------------------------------------------------------------

    def slab(self, segment: Tensor, i: int) -> Tensor:
        """This rank's rows of parameter ``i`` in storage form, as a view of a buffer laid out like the flat shard."""
        held = self.layout.get_segment_range(self.slots[i].cut.shard_rank)
        rows = self.layout.get_row_range(i, held)
        shape = self.layout.tensor_shapes[i]
        if rows.numel == 0:
            return segment[:0].view(0, *shape[1:])
        row = shape[1:].numel()
        start = self.layout.tensor_to_offset[i] + rows.start * row - held.start
        return segment[start : start + rows.numel * row].view(rows.numel, *shape[1:])

    def local_view(self, segment: Tensor, i: int) -> LayoutTensor:
        """Parameter ``i`` of a segment as users see it: a LayoutTensor that aliases the segment."""
        return LayoutTensor.from_local_slab(self.slab(segment, i), self.slots[i].cut)

    def check_materialised(self) -> None:
        """``RuntimeError`` naming a parameter if the bucket is on the meta device, where nothing can be gathered."""
        if self.flat.is_meta:
            raise RuntimeError(
                f"parameter {self.slots[0].name!r} is on the meta device; materialise the sharded model before its "
                "first forward: model.to_empty(device=...) and then load or initialise its values"
            )
        if self.offloaded_from is not None and self.flat.device.type != "cpu":
            names = ", ".join(repr(s.name) for s in self.slots[:4])
            raise RuntimeError(
                f"the shards of parameters {names} are on {self.flat.device}, but the unit was sharded with "
                'CPUOffloadPolicy, which keeps them on the CPU; move the model back with model.to("cpu")'
            )

    def refresh(self) -> None:
        """Before values are gathered: copy back what was stored elsewhere (``p.data = ...``), and alias again.

        A parameter whose local part no longer lies at its place in the flat shard holds newer values than the flat
        shard does; so does one that a module was given in place of the bucket's (``load_state_dict(assign=True)``).
        Raises ``RuntimeError`` naming the parameter when it is no sharded one of the same cut and dtype, so that its
        values cannot be taken over, and when the bucket is still on the meta device.
        """
        self.check_materialised()
        places = self._places
        for i, slot in enumerate(self.slots):
            for owner, attr in slot.owners:
                if owner._parameters.get(attr) is not slot.param:
                    self._adopt(i, owner._parameters.get(attr))
        moved = [i for i, s in enumerate(self.slots) if s.param._local_tensor.data_ptr() != places[i]]  # type: ignore[attr-defined]
        for i in moved:
            self._detach_from_flat(i)  # before any is copied back: two may have exchanged their places
        for i in moved:
            self._copy_back(i)

    def take_values(self, param: Tensor) -> None:
        """``param``, one of the bucket's, was given other data: make it values of the flat shard."""
        i = next((i for i, s in enumerate(self.slots) if s.param is param), None)
        local = param._local_tensor  # type: ignore[attr-defined]
        if i is not None and (local.dtype, local.device) == (self.flat.dtype, self.flat.device):
            self._copy_back(i)  # otherwise the unit moves as a whole, or refresh() refuses

    def _detach_from_flat(self, i: int) -> None:
        """Give parameter ``i`` memory of its own if it lies in the flat shard, at another's place."""
        param = self.slots[i].param
        local = param._local_tensor  # type: ignore[attr-defined]
        if not local.is_meta and local.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr():
            param._local_tensor = local.clone()  # type: ignore[attr-defined]

    def _copy_back(self, i: int) -> None:
        """Copy what lies elsewhere of parameter ``i`` to its place in the flat shard, and alias that again."""
        slot = self.slots[i]
        local = slot.param._local_tensor  # type: ignore[attr-defined]
        if local.numel() == 0:
            return
        slab = self.slab(self.flat.detach(), i).movedim(0, slot.cut.dim)
        if local.shape != slab.shape or local.dtype != slab.dtype or local.is_meta:
            raise RuntimeError(
                f"the storage of parameter {slot.name!r} was replaced by {tuple(local.shape)} {local.dtype} on "
                f"{local.device}, but this rank holds {tuple(slab.shape)} {slab.dtype} on {slab.device} of it; "
                "assign values of that shape and dtype, and convert whole units (not single parameters)"
            )
        with torch.no_grad():
            slab.copy_(local)
        slot.param._local_tensor = slab  # type: ignore[attr-defined]

    def _adopt(self, i: int, given: Any) -> None:
        """Let what a module now holds as parameter ``i`` be the parameter, for all its owners."""
        slot = self.slots[i]
        if not isinstance(given, LayoutTensor) or given.cut != slot.cut:
            what = "None" if given is None else f"a {type(given).__name__} of shape {tuple(given.shape)}"
            raise RuntimeError(
                f"parameter {slot.name!r} of the sharded model was replaced by {what}; give it a sharded parameter of "
                "the same shape, copy full values into it with param.copy_(full) under torch.no_grad(), or change the "
                "model before it is sharded"
            )
        slot.param = given  # type: ignore[assignment]
        ParamLink.set(given, self)
        for owner, attr in slot.owners:
            owner._parameters[attr] = slot.param
        self.follow_requires_grad()

    def follow_storage(self) -> None:
        """After ``Module._apply`` (``to``, ``to_empty``, ``half``): let the flat shard follow its parameters.

        If all of them are now of another device or dtype, it becomes so too, with their values, and they its views.
        """
        locals_ = [s.param._local_tensor for s in self.slots]  # type: ignore[attr-defined]
        device, dtype = locals_[0].device, locals_[0].dtype
        for slot in self.slots:
            ParamLink.set(slot.param, self)  # swapping tensors, as _apply does, swaps their attributes too
        if (device, dtype) == (self.flat.device, self.flat.dtype):
            return
        if any((t.device, t.dtype) != (device, dtype) for t in locals_):
            return  # other modules of the unit are still to come
        flat = torch.zeros(self.flat.shape, dtype=dtype, device=device)
        for i, local in enumerate(locals_):
            slab = self.slab(flat, i).movedim(0, self.slots[i].cut.dim)
            if not local.is_meta:
                slab.copy_(local)
            self.slots[i].param._local_tensor = slab  # type: ignore[attr-defined]
        self.flat = nn.Parameter(flat, requires_grad=self.requires_grad)
        self.dtypes = BucketDtypes.of(dtype, self.policy)
        self.unreduced = Unreduced(self)
        self.set_reduction(self.unit.reduce_op, self.unit.divide_factor)
        self.unit.set_stage(self.unit.reduces, self.unit.all_reduces)
        self.follow_main_grads()
        self.follow_requires_grad()

    @property
    def _places(self) -> list[int]:
        """The address at which each parameter's rows lie; recomputed when the flat shard's storage moves."""
        base = self.flat.data_ptr()
        cached = self.__dict__.get("_places_cache")
        if cached is None or cached[0] != base:
            flat = self.flat.detach()
            cached = (base, [self.slab(flat, i).data_ptr() for i in range(len(self.slots))])
            self.__dict__["_places_cache"] = cached
        return cached[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamBucket:
        """A bucket of its own: own key, own flat shard, and the copied parameters as views of it.

        Parameters come before the modules that own them: a module may read its own while it is copied (``nn.LSTM``).
        """
        flat = nn.Parameter(self.flat.detach().clone(), requires_grad=self.requires_grad)
        twin = object.__new__(ParamBucket)
        memo[id(self)] = twin
        slots = [replace(s, param=copy.deepcopy(s.param, memo), owners=[]) for s in self.slots]
        twin.__init__(slots, self.layout, self.dtypes, self.groups, self.policy, flat, self.offloaded_from)  # type: ignore[misc]
        for i, slot in enumerate(slots):
            slot.param._local_tensor = twin.slab(flat.detach(), i).movedim(0, slot.cut.dim)  # type: ignore[attr-defined]
        twin.name, twin.unit = self.name, copy.deepcopy(self.unit, memo)
        twin.unreduced = copy.deepcopy(self.unreduced, memo)
        twin.set_reduction(twin.unit.reduce_op, twin.unit.divide_factor)
        for slot, original in zip(slots, self.slots, strict=True):
            slot.owners += copy.deepcopy(original.owners, memo)
        return twin
