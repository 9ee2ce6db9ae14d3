"""All-gathers that eager code launches ahead, for units that other units name as their next ones."""

from __future__ import annotations

import torch
from torch import Tensor

from fxshard import comm
from fxshard.bucket import ParamBucket


class Ahead:
    """What is on its way: by bucket, what was launched, what was sent, and of which version of the flat shard."""

    def __init__(self) -> None:
        self._launched: dict[ParamBucket, tuple[Tensor, Tensor, int]] = {}

    def __contains__(self, bucket: ParamBucket) -> bool:
        return bucket in self._launched

    @torch.no_grad()
    def launch(self, bucket: ParamBucket, part: Tensor | None = None) -> None:
        """Start the bucket's all-gather: from its flat shards, collective over its shard group, of more than one rank;
        or from ``part``, where some ranks share what was gathered before."""
        bucket.refresh()
        groups, kept = bucket.groups, bucket.kept_part
        if part is None or kept is None:
            sent = bucket.gather_input()
            started = comm.start_all_gather(sent, groups.shard_size, groups.gather)
        else:
            sent = part
            started = comm.start_all_gather(sent, kept.size, kept.group)
        self._launched[bucket] = (started, sent, bucket.flat._version)

    @torch.no_grad()
    def gather(self, bucket: ParamBucket) -> Tensor:
        """The gathered buffer: what was launched, if the flat shard is unchanged since then, or a new all-gather."""
        if (launched := self._launched.pop(bucket, None)) is not None:
            started, sent, version = launched
            gathered = comm.finish_all_gather(started, sent)
            if version == bucket.flat._version:
                return gathered
        return comm.all_gather(bucket.gather_input(), bucket.groups)

    def drop(self) -> None:
        """Wait for what nobody took."""
        for started, sent, _ in self._launched.values():
            comm.finish_all_gather(started, sent)
        self._launched.clear()
