"""DistributedProcessGroup, ParallelState and DistributedState."""

import torch
import torch.distributed as dist
from outcomes import outcome

from fxshard.distributed import DistributedProcessGroup, DistributedState, ParallelState

synced = DistributedProcessGroup.get_dist_syncd_obj


def refuse(values):
    raise AssertionError("op must not run")


def test_without_a_group_every_wrapper_is_unused_and_op_is_not_applied():
    for group in (None, -1, -100):
        wrapper = DistributedProcessGroup(group)
        assert (wrapper.is_initialized(), wrapper.rank(), wrapper.world_size()) == (False, -1, -1)
    value = object()
    assert synced(value, DistributedProcessGroup(None), refuse) is value


def test_a_group_of_one_applies_op_to_one_value(group_of_one):
    world = DistributedProcessGroup(None)
    assert (world.is_initialized(), world.rank(), world.world_size()) == (True, 0, 1)
    assert synced(3, world, lambda values: ("combined", values)) == ("combined", [3])
    assert synced(3, DistributedProcessGroup(-1), refuse) == 3
    assert repr(world) == "DistributedProcessGroup(group=None, initialized=True, size=1)"


def test_a_parallel_state_uses_the_world_for_data_and_nothing_else_by_default(group_of_one):
    state = ParallelState()
    assert state.data_parallel_group.is_initialized()
    assert not state.tensor_parallel_group.is_initialized()
    assert not state.expert_model_parallel_group.is_initialized()
    for name in ("data_parallel_group", "tensor_parallel_group", "expert_model_parallel_group"):
        assert f"{name}=DistributedProcessGroup(" in repr(state)


def test_only_rank_0_is_the_main_process():
    assert DistributedState(0, 2, torch.device("cpu")).is_main
    assert not DistributedState(1, 2, torch.device("cpu")).is_main


def pairs(*groups):
    """This rank's wrappers of a partition of the world; every rank makes every group."""
    return [DistributedProcessGroup(group) for group in [dist.new_group(list(ranks)) for ranks in groups]]


def chain():
    rank = dist.get_rank()
    rows, columns = pairs((0, 1), (2, 3)), pairs((0, 2), (1, 3))
    mine = [(w.is_initialized(), w.rank(), w.world_size()) for w in rows]
    ordered = synced(rank, rows, list)
    total = synced(rank, [*rows, *columns], sum)
    tensor = synced(torch.tensor([rank]), DistributedProcessGroup(None), torch.cat)
    return mine, ordered, total, tensor.tolist()


def test_the_result_over_one_group_feeds_the_next(ranks4):
    member, outside = (True, 0, 2), (False, -1, -1)
    answers = ranks4.run(chain)
    assert [mine for mine, *_ in answers] == [
        [member, outside],
        [(True, 1, 2), outside],
        [outside, member],
        [outside, (True, 1, 2)],
    ]
    assert [ordered for _, ordered, *_ in answers] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all((total, tensor) == (6, [0, 1, 2, 3]) for _, _, total, tensor in answers)


def send_a_lambda_from_rank_0():
    left, right = pairs((0, 1), (2, 3))
    value = dist.get_rank() or (lambda: None)
    ended = outcome(synced, value, [left, right, DistributedProcessGroup(None)], sum)
    return ended, synced(1, DistributedProcessGroup(None), sum)


def test_a_value_that_cannot_be_sent_fails_on_every_member_of_the_chain_and_hangs_nobody(ranks4):
    answers = ranks4.run(send_a_lambda_from_rank_0, deadline=15)
    (first, text), *others = [ended for ended, _ in answers]
    assert first not in ("value", "RuntimeError") and "lambda" in text
    assert [kind for kind, _ in others] == ["RuntimeError"] * 3
    assert all("member 0" in text for _, text in others)
    assert [after for _, after in answers] == [4] * 4


def op_fails_on_rank_1():
    left, right = pairs((0, 1), (2, 3))

    def op(values):
        if dist.get_rank() == 1:
            raise KeyError("op")
        return sum(values)

    return outcome(synced, 1, [left, right, DistributedProcessGroup(None)], op)


def test_an_op_that_fails_on_one_member_stops_the_members_it_was_to_feed(ranks4):
    answers = ranks4.run(op_fails_on_rank_1, deadline=15)
    assert [kind for kind, _ in answers] == ["RuntimeError", "KeyError", "RuntimeError", "RuntimeError"]
    assert "KeyError" in answers[0][1]
