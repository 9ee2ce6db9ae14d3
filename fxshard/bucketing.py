"""From the parameters of a unit to its buckets: who shares a collective, cut how, in which layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from fxshard.bucket import BucketDtypes, ParamBucket, ParamSlot
from fxshard.bucket_layouts import Layouts, plan_layouts, plan_whole_tensors
from fxshard.cut import Cut
from fxshard.discover import FoundParam
from fxshard.layout_tensor import LayoutTensor
from fxshard.mesh import MeshGroups, groups_of, mesh_device, resolve_mesh, split_mesh
from fxshard.param_link import ParamLink
from fxshard.placement import BlockAtomic, RowAtomic, TensorAtomic, plan_owners

PlacementFn = Callable[[nn.Parameter], Any]
"""From a parameter to how it is cut: a ``Shard`` (or one of ours), None for rows, or a pair of that and the mesh over
which it is cut, also as the ``ShardPlacementResult`` of ``torch.distributed.fsdp``."""


@dataclass(frozen=True)
class Sharding:
    """What the parameters of one unit have in common, and what single ones have of their own."""

    mesh: DeviceMesh
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    placement_fn: PlacementFn | None = None
    replicated: Set[nn.Parameter] = frozenset()
    policies: Mapping[nn.Parameter, MixedPrecisionPolicy] = field(default_factory=dict)

    def place(self, found: FoundParam) -> tuple[Shard, DeviceMesh]:
        """How a parameter is cut, and over which mesh. Collective the first time for replicated ones."""
        if found.param in self.replicated:
            return RowAtomic(), split_mesh(self.mesh, 1)
        asked = self.placement_fn(found.param) if self.placement_fn is not None else None
        mesh = self.mesh
        if isinstance(asked, tuple) and len(asked) == 2 and isinstance(asked[1], DeviceMesh):
            asked, mesh = asked
        elif asked is not None and hasattr(asked, "placement") and hasattr(asked, "mesh_info"):
            asked, mesh = asked.placement, asked.mesh_info.mesh
        return _placement(found, asked), resolve_mesh(mesh, mesh.device_type)


@dataclass(frozen=True)
class Placed:
    """One parameter, how and over which mesh it is cut, and its dtypes."""

    found: FoundParam
    placement: Shard
    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    dtypes: BucketDtypes


def place(found: Sequence[FoundParam], sharding: Sharding) -> list[Placed]:
    """Decide for each parameter. Collective the first time where a mesh has replicated parameters.

    Raises ``ValueError`` for a placement that the parameter cannot have, ``TypeError`` for one of another kind.
    """
    placed = []
    for f in found:
        policy = sharding.policies.get(f.param, sharding.policy)
        placed.append(Placed(f, *sharding.place(f), policy, BucketDtypes.of(f.param.dtype, policy)))
    return placed


def make_buckets(placed: Sequence[Placed], offload: OffloadPolicy) -> list[ParamBucket]:
    """Buckets by (mesh, storage, gather, reduce dtype, requires_grad, whole tensors or rows), in order of first
    appearance. ``ValueError`` for an owner that is no rank of the mesh."""
    members: dict[Any, list[Placed]] = {}
    for p in placed:
        whole = isinstance(p.placement, TensorAtomic)
        policy = (p.policy.param_dtype, p.policy.reduce_dtype)
        members.setdefault((p.mesh, p.dtypes, policy, p.found.param.requires_grad, whole), []).append(p)
    return [bucket for group in members.values() for bucket in _buckets_of(group, offload)]


def _buckets_of(group: Sequence[Placed], offload: OffloadPolicy) -> Iterator[ParamBucket]:
    mesh, policy, dtypes = group[0].mesh, group[0].policy, group[0].dtypes
    groups, device = groups_of(mesh), mesh_device(mesh)
    for ids, layout in _layouts([p.found for p in group], [p.placement for p in group], groups.shard_size, dtypes):
        here = [group[i] for i in ids]
        cuts = [Cut(mesh, layout, i, p.placement.dim, p.found.param.shape, p.placement) for i, p in enumerate(here)]
        params, owners = [p.found.param for p in here], [p.found.owners for p in here]
        bucket = _make_bucket(params, owners, cuts, dtypes, groups, policy, device, offload)
        for slot, p in zip(bucket.slots, here, strict=True):
            slot.name = p.found.name
        yield bucket


def _make_bucket(
    params: Sequence[nn.Parameter],
    owners: Sequence[list[tuple[nn.Module, str]]],
    cuts: Sequence[Cut],
    dtypes: BucketDtypes,
    groups: MeshGroups,
    policy: MixedPrecisionPolicy,
    device: torch.device,
    offload: OffloadPolicy,
) -> ParamBucket:
    """Copy this rank's rows of ``params`` (full values, equal on all ranks) into a new flat shard; no collective.

    Gaps and padding are zeros: they travel through collectives and must not carry NaN.
    """
    layout = cuts[0].layout
    length = layout.rank_size(cuts[0].shard_rank)
    offloads = isinstance(offload, CPUOffloadPolicy) and device.type != "cpu"
    computes, device = device, torch.device("cpu") if offloads else device
    device = torch.device("meta") if params[0].is_meta else device
    trainable = params[0].requires_grad
    values = torch.zeros(length, dtype=dtypes.storage, device=device)
    if offloads and isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and not values.is_meta:
        values = values.pin_memory()
    flat = nn.Parameter(values, requires_grad=trainable)
    slots = [ParamSlot(p, c, o) for p, c, o in zip(params, cuts, owners, strict=True)]
    bucket = ParamBucket(slots, layout, dtypes, groups, policy, flat, computes if offloads else None)
    data = flat.detach()
    for i, (slot, full) in enumerate(zip(slots, params, strict=True)):
        slab = bucket.slab(data, i)
        first = slot.cut.rows(slot.cut.shard_rank)[0]
        if not full.is_meta and slab.numel():
            stored = full.detach().movedim(slot.cut.dim, 0)
            slab.copy_(stored[first : first + slab.shape[0]])
        slot.param = nn.Parameter(LayoutTensor.from_local_slab(slab, slot.cut), requires_grad=trainable)
        _take_over(slot.param, full, slot.cut)
        ParamLink.set(slot.param, bucket)
    bucket.follow_requires_grad()
    return bucket


def _take_over(param: nn.Parameter, full: nn.Parameter, cut: Cut) -> None:
    """What users put on a parameter: attributes, hooks, a gradient."""
    param.__dict__.update(full.__dict__)
    for hook in (full._backward_hooks or {}).values():
        param.register_hook(hook)
    for hook in (getattr(full, "_post_accumulate_grad_hooks", None) or {}).values():
        param.register_post_accumulate_grad_hook(hook)
    if full.grad is not None:
        rows = full.grad.to_dense() if full.grad.is_sparse else full.grad
        param.grad = LayoutTensor.from_local_slab(cut.own_part(rows).movedim(cut.dim, 0).clone(), cut)


def _layouts(group: Sequence[FoundParam], placements: Sequence[Shard], dp_size: int, dtypes: BucketDtypes) -> Layouts:
    stored = [f.param.movedim(p.dim, 0).shape for f, p in zip(group, placements, strict=True)]
    if isinstance(placements[0], TensorAtomic):
        planned = plan_owners([shape.numel() for shape in stored], dp_size)
        given = [p.owner if isinstance(p, TensorAtomic) else None for p in placements]
        owners = [p if g is None else g for p, g in zip(planned, given, strict=True)]
        for f, owner in zip(group, owners, strict=True):
            if owner >= dp_size:
                raise ValueError(
                    f"shard_placement_fn gave TensorAtomic({owner}) for parameter {f.name!r}, but the mesh shards over "
                    f"{dp_size} ranks; give an owner below {dp_size} or TensorAtomic()"
                )
        return [(list(range(len(group))), plan_whole_tensors(stored, dp_size, owners))]
    blocks = [p.block_size if isinstance(p, BlockAtomic) else 1 for p in placements]
    return plan_layouts(stored, dp_size, dtypes.gather.itemsize, blocks)


def _placement(found: FoundParam, asked: Any) -> Shard:
    if asked is None:
        return RowAtomic()
    if not isinstance(asked, Shard):
        raise TypeError(
            f"shard_placement_fn gave {asked!r} for parameter {found.name!r}; give Shard(k), RowAtomic(), "
            "BlockAtomic(rows), TensorAtomic() or None, or a pair of one of them and a DeviceMesh"
        )
    ndim, rows = found.param.ndim, found.param.shape[0]
    if not -ndim <= asked.dim < ndim:
        raise ValueError(
            f"shard_placement_fn gave Shard({asked.dim}) for parameter {found.name!r}, which has {ndim} dims; "
            f"give a dim in [{-ndim}, {ndim})"
        )
    if found.param.numel() == 0:
        return RowAtomic()  # there is nothing to cut
    if isinstance(asked, BlockAtomic) and rows % asked.block_size:
        raise ValueError(
            f"shard_placement_fn gave {asked!r} for parameter {found.name!r} of {rows} rows, and blocks stay whole; "
            "choose a block size that divides the rows, or RowAtomic()"
        )
    if type(asked) is not Shard:
        return asked
    return RowAtomic() if asked.dim % ndim == 0 else Shard(asked.dim % ndim)
