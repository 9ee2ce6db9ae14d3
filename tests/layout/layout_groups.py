"""Random groups of tensor shapes, and the rules that every row-atomic layout obeys."""

import math
from collections.abc import Iterator
from random import Random

from fxshard.layout import GlobalLayout, Range, intersect_ranges

SHARDS = (1, 2, 3, 5, 8)

DOCUMENTED = [(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)]
"""The example of Megatron-FSDP's documentation, drawn there on five shards."""

BLOCKS = {
    "GPT-2": [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072)] + [(768,)] * 5,
    "Llama-2-7B": [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)] + [(4096,)] * 2,
    "Llama-3-8B": [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)] + [(4096,)] * 2,
    "Llama-3-70B": [(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)] + [(8192,)] * 2,
    "Qwen2.5-7B": [(3584, 3584)] * 2
    + [(3584,)] * 3
    + [(512, 3584)] * 2
    + [(512,)] * 2
    + [(18944, 3584)] * 2
    + [(3584, 18944)],
    "MLP": [(640, 1280), (1280, 1000), (1000, 1100), (10, 1100)],
    "conv": [(64, 3, 7, 7), (64, 64, 1, 1), (64, 64, 3, 3), (256, 64, 1, 1), (256, 64, 1, 1), (128, 256, 1, 1)]
    + [(128, 128, 3, 3), (512, 128, 1, 1), (1000, 2048), (1000,)]
    + [(64,)] * 4
    + [(256,)] * 2
    + [(128,)] * 2
    + [(512,)] * 2,
    "primes": [(97, 101), (103, 107), (13,)],
}


def random_groups(count: int, seed: int) -> Iterator[tuple[list[tuple[int, ...]], int]]:
    """Groups of up to eight small tensors, one in ten without rows, and a block size that divides every dim 0."""
    random = Random(seed)
    for _ in range(count):
        block_size = random.choice((1, 1, 1, 2, 3))
        shapes = []
        for _ in range(random.randint(0, 8)):
            rows = 0 if random.random() < 0.1 else block_size * random.randint(1, 9)
            shapes.append((rows, *(random.randint(1, 7) for _ in range(random.randint(0, 2)))))
        yield shapes, block_size


def block_of(shape: tuple[int, ...], block_size: int = 1) -> int:
    return block_size * math.prod(shape[1:])


def segments(layout: GlobalLayout) -> list[Range]:
    return [layout.get_segment_range(k) for k in range(layout.dp_size)]


def check_row_atomic(layout: GlobalLayout, shapes: list[tuple[int, ...]], dp_size: int, block_size: int = 1) -> None:
    """Equal segments partition the buffer, own every element once, and cut between blocks of rows."""
    parts = segments(layout)
    assert len(parts) == dp_size and layout.has_equal_shard_sizes
    assert [part.start for part in parts] + [layout.size] == [0, *(part.end for part in parts)]
    taken: set[int] = set()
    for i, shape in enumerate(shapes):
        tensor = layout.get_tensor_range(i)
        assert tensor.numel == math.prod(shape)
        assert taken.isdisjoint(range(tensor.start, tensor.end))
        taken.update(range(tensor.start, tensor.end))
        owned = [intersect_ranges(tensor, part).numel for part in parts]
        assert sum(owned) == tensor.numel
        assert all(numel % block_of(shape, block_size) == 0 for numel in owned)
        rows = [layout.get_row_range(i, part) for part in parts]
        assert [sum(r.numel for r in rows[:k]) for k in range(dp_size)] == [r.start for r in rows]
        assert sum(r.numel for r in rows) == shape[0]
