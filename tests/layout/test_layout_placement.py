"""Placements of flat buffers, and owners for whole tensors."""

import copy
import pickle
from itertools import product
from random import Random

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fxshard.placement import BlockAtomic, RowAtomic, TensorAtomic, check_flat_placements, plan_owners

R, P = Replicate(), Partial("avg")
KINDS = [RowAtomic(), BlockAtomic(4), BlockAtomic(8), TensorAtomic(), Shard(0)]


@pytest.mark.parametrize("first, second", [(a, b) for a, b in product(range(5), repeat=2) if a != b])
def test_different_placements_are_unequal_in_either_order(first, second):
    assert KINDS[first] != KINDS[second]
    assert (KINDS[first] == KINDS[second]) is False


@pytest.mark.parametrize("make", [RowAtomic, lambda: BlockAtomic(4), TensorAtomic])
def test_equal_placements_hash_alike_and_copies_keep_their_kind(make):
    placement = make()
    for other in (make(), copy.copy(placement), copy.deepcopy(placement), pickle.loads(pickle.dumps(placement))):
        assert type(other) is type(placement) and other == placement and hash(other) == hash(placement)
    assert isinstance(placement, Shard) and placement.dim == 0 and placement.is_shard() and placement.is_shard(0)


@pytest.mark.parametrize("text", ["RowAtomic()", "BlockAtomic(4)", "TensorAtomic()"])
def test_placements_print_as_the_call_that_makes_them(text):
    placement = eval(text)
    assert repr(placement) == str(placement) == text
    source, names = placement.__fx_repr__()
    assert eval(source, names) == placement


@pytest.mark.parametrize("block_size", [0, -2])
def test_a_block_has_at_least_one_row(block_size):
    with pytest.raises(ValueError, match=f"positive number of rows, not {block_size}"):
        BlockAtomic(block_size)


@pytest.mark.parametrize(
    "placements",
    [[R], [RowAtomic()], [R, BlockAtomic(2)], [P, Shard(0)], [RowAtomic(), RowAtomic()], [R, TensorAtomic()], [R, P]],
)
def test_sharded_axes_may_come_last(placements):
    check_flat_placements(placements)


@pytest.mark.parametrize(
    "placements, error, message",
    [
        ([_StridedShard(0, split_factor=2), Shard(0)], TypeError, "cannot place a flat buffer"),
        ([R, Shard(1)], NotImplementedError, "cuts along dim 1"),
        ([TensorAtomic(), RowAtomic()], ValueError, "cannot be mixed"),
        ([TensorAtomic(), TensorAtomic()], NotImplementedError, "one mesh axis only"),
        ([RowAtomic(), R], ValueError, "sharded axes must come last"),
        ([RowAtomic(), P, RowAtomic()], ValueError, "sharded axes must come last"),
    ],
)
def test_placements_that_leave_no_single_range_are_refused(placements, error, message):
    with pytest.raises(error, match=message):
        check_flat_placements(placements)


@pytest.mark.parametrize(
    "numels, dp_size, owners",
    [
        ([5, 5, 4, 3, 3], 2, (0, 1, 0, 1, 1)),
        ([1, 2, 3], 1, (0, 0, 0)),
        ([4, 4, 4], 5, (0, 1, 2)),
        ([0, 7, 0], 2, (1, 0, 1)),
        ([], 3, ()),
    ],
)
def test_the_largest_tensor_goes_to_the_least_loaded_segment(numels, dp_size, owners):
    assert plan_owners(numels, dp_size) == owners


def test_loads_stay_within_the_bound_for_largest_first():
    random = Random(3)
    for _ in range(200):
        numels = [random.randint(0, 50) for _ in range(random.randint(1, 30))]
        dp_size = random.randint(1, 8)
        loads = [0] * dp_size
        for owner, numel in zip(plan_owners(numels, dp_size), numels, strict=True):
            loads[owner] += numel
        assert max(loads) <= sum(numels) / dp_size + (1 - 1 / dp_size) * max(numels)


@pytest.mark.parametrize("numels, dp_size, message", [([-1], 0, "dp_size"), ([1, -1], 2, "tensor 1 cannot have")])
def test_bad_loads_are_refused(numels, dp_size, message):
    with pytest.raises(ValueError, match=message):
        plan_owners(numels, dp_size)
