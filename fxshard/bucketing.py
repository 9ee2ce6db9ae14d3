"""From the parameters of a unit to its buckets: who shares a collective, cut how, in which layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from fxshard.bucket import BucketDtypes, ParamBucket, make_bucket
from fxshard.bucket_layouts import Layouts, plan_layouts, plan_whole_tensors
from fxshard.cut import Cut
from fxshard.discover import FoundParam
from fxshard.mesh import groups_of, mesh_device
from fxshard.placement import BlockAtomic, RowAtomic, TensorAtomic, plan_owners

PlacementFn = Callable[[nn.Parameter], Shard | None]


def make_buckets(
    found: Sequence[FoundParam], mesh: DeviceMesh, policy: MixedPrecisionPolicy, placement_fn: PlacementFn | None
) -> list[ParamBucket]:
    """Buckets by (storage, gather, reduce dtype, requires_grad, whole tensors or rows), in order of first appearance.

    Raises ``ValueError`` for a placement that the parameter cannot have, ``TypeError`` for one of another kind.
    """
    placements = {id(f): _placement(f, placement_fn) for f in found}
    members: dict[tuple[BucketDtypes, bool, bool], list[FoundParam]] = {}
    for f in found:
        whole = isinstance(placements[id(f)], TensorAtomic)
        members.setdefault((BucketDtypes.of(f.param.dtype, policy), f.param.requires_grad, whole), []).append(f)
    buckets = []
    for (dtypes, _, _), group in members.items():
        asked = [placements[id(f)] for f in group]
        for ids, layout in _layouts(group, asked, groups_of(mesh).shard_size, dtypes):
            here = [(group[i], asked[i]) for i in ids]
            cuts = [Cut(mesh, layout, i, p.dim, f.param.shape, p) for i, (f, p) in enumerate(here)]
            params, owners = [f.param for f, _ in here], [f.owners for f, _ in here]
            bucket = make_bucket(params, owners, cuts, dtypes, groups_of(mesh), mesh_device(mesh))
            for slot, (f, _) in zip(bucket.slots, here, strict=True):
                slot.name = f.name
            buckets.append(bucket)
    return buckets


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


def _placement(found: FoundParam, placement_fn: PlacementFn | None) -> Shard:
    asked = placement_fn(found.param) if placement_fn is not None else None
    if asked is None:
        return RowAtomic()
    if not isinstance(asked, Shard):
        raise TypeError(
            f"shard_placement_fn gave {asked!r} for parameter {found.name!r}; give Shard(k), RowAtomic(), "
            "BlockAtomic(rows), TensorAtomic() or None"
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
