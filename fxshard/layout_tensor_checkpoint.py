"""What torch.distributed.checkpoint asks of a LayoutTensor: which part of the full tensor this rank saves and loads.

Each rank states its true rows, from the layout, without a collective. A rank without rows states nothing. On a
(replicate, shard) mesh replicas state the same part, which DCP writes once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fxshard.cut import Cut
from fxshard.layout_tensor import LayoutTensor


def chunks(cut: Cut) -> list[ChunkStorageMetadata]:
    """The part of the full tensor that this rank owns, in elements per logical dim: one chunk, or none without rows.

    A tensor without any elements is stated by shard rank 0, so that a checkpoint knows its name and shape.
    """
    start, count = cut.own_rows
    if count == 0 and (cut.row_count > 0 or cut.shard_rank > 0):
        return []
    offsets = [0] * len(cut.shape)
    offsets[cut.dim] = start
    return [ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=cut.own_shape)]


def write_items(fqn: str, tensor: LayoutTensor) -> list[WriteItem]:
    """What this rank writes under ``fqn``."""
    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.shape),
        )
        for chunk in chunks(tensor._cut)
    ]


def shard_at(tensor: LayoutTensor, index: MetadataIndex) -> Tensor:
    """The local part that ``index`` names, aliasing the flat shard. ``ValueError`` if its offset is not this rank's."""
    own = [chunk.offsets for chunk in chunks(tensor._cut)]
    if index.offset is not None and index.offset not in own:
        raise ValueError(
            f"a checkpoint asks rank {tensor._cut.shard_rank} of the shard dim for the part of {index.fqn!r} at "
            f"{tuple(index.offset)}, but it owns {[tuple(offset) for offset in own] or 'none'}"
        )
    return tensor._local_tensor.detach()
