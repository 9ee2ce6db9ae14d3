"""Device meshes and the process groups that fxshard takes from them.

A mesh has one dim (shard) or two (replicate, shard). All-gathers, reduce-scatters and all-reduces each have a process
group of their own, because one communicator runs its collectives one after another on its stream: with a single group
a prefetched all-gather would wait behind the reduce-scatter of the layer above. Groups are known by *name* everywhere
else: names are what graph nodes hold.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxshard import _torch


@dataclass(frozen=True)
class MeshGroups:
    """What a bucket needs to know of its mesh: sizes, and names of groups (None where the size is 1).

    ``gather`` and ``reduce`` span the same ranks (the shard dim); ``replicate`` spans the replicate dim.
    """

    shard_size: int
    replicate_size: int
    gather: str | None
    reduce: str | None
    replicate: str | None

    @property
    def backend(self) -> str | None:
        """What carries the reductions; None where there is nobody to reduce with."""
        name = self.reduce or self.replicate
        return None if name is None else dist.get_backend(_torch.group_of(name))

    @property
    def size(self) -> int:
        """Ranks that see different data."""
        return self.shard_size * self.replicate_size


@dataclass(frozen=True)
class MeshPart:
    """``size`` neighbours along the shard dim, of which this rank has number ``rank``, and the name of their group."""

    size: int
    rank: int
    group: str

    def take(self, gathered: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's part of a gathered buffer: 1-D, one of ``size`` equal parts, its dtype."""
        return gathered.view(self.size, -1)[self.rank].clone()


def resolve_mesh(mesh: DeviceMesh | None, device_type: str) -> DeviceMesh:
    """The mesh to shard over: the given one, the 1-D mesh of the whole world, or a mesh of this process alone.

    Not collective by itself, but on several ranks ``init_device_mesh`` is. Raises ``ValueError`` for a mesh of more
    than two dims and ``RuntimeError`` in a launch of several ranks whose process group is not initialised.
    """
    if mesh is not None:
        if mesh.ndim > 2:
            raise ValueError(
                f"mesh has {mesh.ndim} dims {mesh.mesh_dim_names or tuple(mesh.shape)}, but fxshard shards over 1 dim "
                "(shard) or 2 dims (replicate, shard); pass a slice of the mesh that holds its data-parallel dims"
            )
        return mesh
    if dist.is_available() and dist.is_initialized():
        return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    world = os.environ.get("WORLD_SIZE") or "1"
    if world != "1":
        raise RuntimeError(
            f"this is a launch of several ranks (WORLD_SIZE={world}), but torch.distributed has no process group yet; "
            "call torch.distributed.init_process_group (or enter fxshard.distributed.distributed_run) before sharding, "
            "or unset WORLD_SIZE to train in one process"
        )
    return _torch.mesh_of_one(device_type)


def groups_of(mesh: DeviceMesh) -> MeshGroups:
    """The groups of a mesh, made at the first call (collective over the mesh's ranks then) and kept on the mesh."""
    cached = getattr(mesh, "_fxshard_groups", None)
    if cached is None:
        cached = _make_groups(mesh)
        mesh._fxshard_groups = cached  # type: ignore[attr-defined]
    return cached


def _make_groups(mesh: DeviceMesh) -> MeshGroups:
    shard_dim = mesh.ndim - 1
    gather = reduce = replicate = None
    if mesh.size(shard_dim) > 1:
        group = mesh.get_group(shard_dim)
        gather = group.group_name
        ranks = dist.get_process_group_ranks(group)
        reduce = _torch.new_group(ranks, share_timeout(mesh, shard_dim), "reduce").group_name
    if mesh.ndim == 2 and mesh.size(0) > 1:
        replicate = mesh.get_group(0).group_name
        share_timeout(mesh, 0)
    return MeshGroups(
        shard_size=mesh.size(shard_dim),
        replicate_size=mesh.size(0) if mesh.ndim == 2 else 1,
        gather=gather,
        reduce=reduce,
        replicate=replicate,
    )


def share_timeout(mesh: DeviceMesh, dim: int) -> timedelta | None:
    """Let collectives over a dim of the mesh wait for its ranks as long as those over the default group.

    torch gives a group that is made without a timeout, as those of a mesh, its own default of 10 or 30 minutes,
    whatever the default group has. A group that has another one keeps it. Returns the timeout; None where the backend
    does not say.
    """
    group, run = mesh.get_group(dim), _torch.group_timeout(None, mesh.device_type)
    limit = _torch.group_timeout(group, mesh.device_type)
    if run is not None and limit is not None and limit != run and limit == _torch.default_timeout(group):
        _torch.set_group_timeout(group, run)
        limit = run
    return limit


def split_mesh(mesh: DeviceMesh, shard_size: int) -> DeviceMesh:
    """A (replicate, shard) mesh of all ranks of ``mesh`` in their order, neighbours in groups of ``shard_size``.

    With a shard size of 1 it is for parameters that stay whole. Made at the first call for a size (collective over the
    mesh's ranks then) and kept on the mesh. ``ValueError`` if the size does not divide the ranks.
    """
    if shard_size < 1 or mesh.size() % shard_size:
        raise ValueError(f"groups of {shard_size} ranks do not divide a mesh of {mesh.size()}; give a divisor of that")
    if mesh.size(mesh.ndim - 1) == shard_size and (mesh.ndim == 2 or mesh.size() == shard_size):
        return mesh
    kept: dict[int, DeviceMesh] = mesh.__dict__.setdefault("_fxshard_split", {})
    if shard_size not in kept:
        ranks, limit = mesh.mesh.reshape(-1, shard_size), share_timeout(mesh, mesh.ndim - 1)
        mine = (ranks == dist.get_rank()).nonzero()[0].tolist()
        replicas = _torch.new_group(ranks[:, mine[1]].tolist(), limit, "replicate")
        shards = _torch.new_group(ranks[mine[0]].tolist(), limit, "shard")
        names = ("replicate", "shard")
        kept[shard_size] = DeviceMesh.from_group([replicas, shards], mesh.device_type, ranks, mesh_dim_names=names)
    return kept[shard_size]


def part_of(mesh: DeviceMesh, size: int) -> MeshPart:
    """The ranks that share with this one what forward keeps, where that is more than a segment each.

    ``size`` divides the shard size. Made at the first call for a size (collective over the mesh's ranks then) and kept
    on the mesh.
    """
    kept: dict[int, MeshPart] = mesh.__dict__.setdefault("_fxshard_parts", {})
    if size not in kept:
        shard_dim = mesh.ndim - 1
        ranks, rank = dist.get_process_group_ranks(mesh.get_group(shard_dim)), mesh.get_local_rank(shard_dim)
        first = rank - rank % size
        group = _torch.new_group(ranks[first : first + size], share_timeout(mesh, shard_dim), "part")
        kept[size] = MeshPart(size, rank - first, group.group_name)
    return kept[size]


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Ranks of the world in a mesh, ascending."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this process on which the mesh computes."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
