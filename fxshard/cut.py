"""Cut: which rows of one parameter each shard rank owns.

A parameter is stored with the dim it is cut along in front (its *storage form*), so that its rows are contiguous in the
flat buffer of its bucket; `GlobalLayout` says where the segments' boundaries fall between those rows. A cut joins the
layout with the device mesh and with the parameter's logical shape. Rows are counted along the logical dim ``dim``.

A cut is a fact that every rank states in the same way, except for the properties named ``own_*`` and ``shard_rank``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from fxshard import _torch
from fxshard.layout import GlobalLayout


def to_storage_form(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A view of ``tensor`` with ``dim`` moved to the front."""
    return tensor.movedim(dim, 0) if dim else tensor


def to_logical_form(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A view of ``tensor``, which is in storage form, with its first dim moved back to ``dim``."""
    return tensor.movedim(0, dim) if dim else tensor


@dataclass(frozen=True)
class Cut:
    """How one parameter is cut. Immutable, hashable, compared by value.

    Fields:
        mesh: 1-D (shard) or 2-D (replicate, shard); parameters are cut over the last dim only.
        layout: the bucket's layout, with one segment per rank of the shard dim.
        index: the parameter's tensor id in the layout.
        dim: logical dim along which rows run, not negative.
        shape: full logical shape; with ``dim`` moved to the front it is ``layout.tensor_shapes[index]``.
        placement: what ``placements`` shows for the shard dim of the mesh.

    Raises ``ValueError`` if the fields contradict each other, or for a 0-D shape.
    """

    mesh: DeviceMesh
    layout: GlobalLayout
    index: int
    dim: int
    shape: torch.Size
    placement: Shard

    def __post_init__(self) -> None:
        if self.mesh.ndim not in (1, 2):
            raise ValueError(f"a cut needs a mesh of 1 dim (shard) or 2 (replicate, shard), not of {self.mesh.ndim}")
        if self.layout.dp_size != self.shard_world:
            raise ValueError(
                f"the layout has {self.layout.dp_size} segments, but the shard dim of the mesh has {self.shard_world} "
                "ranks; plan the layout with dp_size equal to the size of the mesh's last dim"
            )
        if not 0 <= self.dim < len(self.shape):
            raise ValueError(
                f"cannot cut a tensor of shape {tuple(self.shape)} along dim {self.dim}: choose a dim from 0 to "
                f"{len(self.shape) - 1}; reshape a 0-D tensor to (1,)"
            )
        if self.placement.dim != self.dim:
            raise ValueError(f"rows run along dim {self.dim}, but the placement {self.placement} names another dim")
        stored = self.layout.tensor_shapes[self.index]
        if self.storage_shape != stored:
            raise ValueError(
                f"a tensor of shape {tuple(self.shape)} cut along dim {self.dim} is stored as "
                f"{tuple(self.storage_shape)}, but tensor {self.index} of the layout has shape {tuple(stored)}"
            )

    def __deepcopy__(self, memo: dict[int, object]) -> Cut:
        return self  # immutable, and process groups cannot be copied

    # ---- facts that are the same on every rank -------------------------------------------------------------------

    @property
    def shard_world(self) -> int:
        """Number of ranks of the shard dim."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def row_count(self) -> int:
        """Rows of the full tensor."""
        return self.shape[self.dim]

    @cached_property
    def storage_shape(self) -> torch.Size:
        """The full shape with ``dim`` in front."""
        rest = [size for d, size in enumerate(self.shape) if d != self.dim]
        return torch.Size([self.shape[self.dim], *rest])

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh dim: ``Replicate()`` for a replicate dim, then one that equals ``placement``.

        Torch's utilities that ask that placement for a rank's rows are told those of this cut, not ``torch.chunk``'s.
        """
        told = _torch.placement_with_rows(self.placement, self.rows)
        return (*(Replicate() for _ in range(self.mesh.ndim - 1)), told)

    def rows(self, shard_rank: int) -> tuple[int, int]:
        """First row and number of rows that ``shard_rank`` owns.

        A rank without rows reports the number of rows below it. ``IndexError`` for a rank outside the shard dim.
        """
        owned = self.layout.get_row_range(self.index, self.layout.get_segment_range(shard_rank))
        return owned.start, owned.numel

    @cached_property
    def all_rows(self) -> tuple[tuple[int, int], ...]:
        """``rows`` of every rank of the shard dim."""
        return tuple(self.rows(rank) for rank in range(self.shard_world))

    def local_shape(self, shard_rank: int) -> torch.Size:
        """Shape of what ``shard_rank`` owns, in logical dim order."""
        return self._with_rows(self.rows(shard_rank)[1])

    def _with_rows(self, count: int) -> torch.Size:
        return torch.Size([*self.shape[: self.dim], count, *self.shape[self.dim + 1 :]])

    # ---- this process --------------------------------------------------------------------------------------------

    @cached_property
    def shard_rank(self) -> int:
        """This process's coordinate on the shard dim. ``RuntimeError`` if it is not part of the mesh."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            raise RuntimeError(
                f"this process is not part of the mesh {self.mesh}, so it owns no rows; only call this on its ranks"
            )
        return coordinate[-1]

    @cached_property
    def own_rows(self) -> tuple[int, int]:
        """``rows`` of this process."""
        return self.rows(self.shard_rank)

    @cached_property
    def own_shape(self) -> torch.Size:
        """``local_shape`` of this process."""
        return self._with_rows(self.own_rows[1])

    def own_part(self, full: torch.Tensor) -> torch.Tensor:
        """The view of ``full`` (logical shape) that this process owns."""
        return full.narrow(self.dim, *self.own_rows)
