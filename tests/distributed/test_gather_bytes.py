"""gather_bytes and gather_state_dicts: every member's bytes on one rank, bounded, never run as code."""

import os
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from outcomes import outcome, replaced

from fxshard.distributed import all_reduce, broadcast_from, exchange, gather, gather_bytes, gather_state_dicts
from fxshard.distributed.envelope import Envelope


def piece(rank, length):
    return bytes((rank + index) % 251 for index in range(length))


def gather_lengths(lengths, dst, chunk_bytes):
    got = gather_bytes(piece(dist.get_rank(), lengths[dist.get_rank()]), dst, chunk_bytes=chunk_bytes)
    return got, None if got is None else {type(each).__name__ for each in got}


@pytest.mark.parametrize(
    "lengths, chunk_bytes",
    [
        ((3, 5), 268435456),
        ((0, 5), 2),
        ((0, 0), 4),
        ((8, 8), 4),
        ((7, 9), 4),
        ((9, 7), 4),
        ((3, 2), 1),
    ],
)
@pytest.mark.parametrize("dst", [0, 1])
def test_every_length_arrives_whole_on_dst_only(ranks2, lengths, chunk_bytes, dst):
    answers = ranks2.run(gather_lengths, lengths, dst, chunk_bytes)
    assert answers.pop(1 - dst) == (None, None)
    assert answers == [([bytearray(piece(rank, length)) for rank, length in enumerate(lengths)], {"bytearray"})]


def test_four_ranks_gather_unequal_lengths_in_rank_order(ranks4):
    lengths = (5, 0, 12, 4)
    answers = ranks4.run(gather_lengths, lengths, 2, 4)
    assert answers[2][0] == [bytearray(piece(rank, length)) for rank, length in enumerate(lengths)]
    assert [answers[rank][0] for rank in (0, 1, 3)] == [None] * 3


def gather_other_buffers():
    words = memoryview(torch.arange(3, dtype=torch.int32).numpy())
    return gather_bytes(words, 0), gather_bytes(bytearray(b"ab"), 0)


def test_any_buffer_counts_in_bytes(ranks2):
    words = [bytearray(b"\0\0\0\0\1\0\0\0\2\0\0\0")] * 2
    assert ranks2.run(gather_other_buffers)[0] == (words, [bytearray(b"ab")] * 2)


def gather_in_a_sub_group():
    group = dist.new_group([1, 3])
    rank = dist.get_rank()
    return (
        outcome(gather_bytes, piece(rank, rank), 3, group),
        outcome(lambda: list(gather_state_dicts({"rank": rank}, 3, group))),
        outcome(gather_bytes, b"", 2, group),
    )


def test_a_sub_group_gathers_on_a_global_rank_and_refuses_non_members(ranks4):
    answers = ranks4.run(gather_in_a_sub_group)
    assert answers[3][0] == ("value", [bytearray(piece(1, 1)), bytearray(piece(3, 3))])
    assert answers[3][1] == ("value", [{"rank": 1}, {"rank": 3}])
    assert answers[1][:2] == (("value", None), ("value", []))
    for outside in (0, 2):
        assert all(kind == "ValueError" and "not a member" in text for kind, text in answers[outside])
    for member in (1, 3):
        assert answers[member][2][0] == "ValueError" and "in the group [1, 3], got 2" in answers[member][2][1]


def refused_arguments():
    return [
        outcome(gather_bytes, b"a", 0, None, 0),
        outcome(gather_bytes, b"a", 2),
        outcome(gather_state_dicts, {}, -1),
        len(gather_bytes(b"a", 0) or []),
    ]


def test_bad_arguments_are_refused_before_anything_moves(ranks2):
    for (chunk, chunk_text), (dst, dst_text), (state, _), _ in ranks2.run(refused_arguments):
        assert (chunk, dst, state) == ("ValueError",) * 3
        assert "chunk_bytes must be positive, got 0" in chunk_text and "in the group [0, 1], got 2" in dst_text
    assert [answer[3] for answer in ranks2.run(refused_arguments)] == [2, 0]


def message_sizes():
    sizes, original = [], dist.gather

    def recording(tensor, *args, **kwargs):
        sizes.append(tensor.nbytes)
        original(tensor, *args, **kwargs)

    with replaced(dist, "gather", recording):
        gather_bytes(piece(0, 10 + 7 * dist.get_rank()), 0, chunk_bytes=5)
    return sizes


def test_no_message_is_larger_than_a_chunk_and_all_ranks_take_the_same_rounds(ranks2):
    assert ranks2.run(message_sizes) == [[5, 5, 5, 2]] * 2


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def gather_hostile(path):
    data = pickle.dumps(Hostile(path))
    verbatim = gather_bytes(data, 0)
    if dist.get_rank() == 1:
        sent = Envelope("gather_state_dicts", "ok", payload=data), None
        with replaced(gather, "attempt", lambda label, fn: sent):
            return list(gather_state_dicts({}, 0))
    states = gather_state_dicts({"mine": 1}, 0)
    return verbatim == [data, data], next(states), outcome(next, states)[0]


def test_received_bytes_are_never_run_as_code(ranks2, tmp_path):
    path = str(tmp_path / "made by the pickle")
    verbatim, first, second = ranks2.run(gather_hostile, path)[0]
    assert verbatim and first == {"mine": 1} and second not in ("value", "StopIteration")
    assert not os.path.exists(path)


def exchange_hostile(path):
    sent = Envelope("value", "ok", payload=pickle.dumps(Hostile(path))), None
    hostile = replaced(exchange, "attempt", lambda label, fn: sent) if dist.get_rank() == 1 else nullcontext()
    with hostile:
        reduced = outcome(all_reduce, "value", int, list)
        return reduced[0], outcome(broadcast_from, "value", int, 1)[0]


def test_values_that_ranks_exchange_are_never_run_as_code(ranks2, tmp_path):
    path = str(tmp_path / "made by the pickle")
    assert ranks2.run(exchange_hostile, path, deadline=15) == [("UnpicklingError", "UnpicklingError")] * 2
    assert not os.path.exists(path)


def gather_without_iterating():
    states = gather_state_dicts({"rank": dist.get_rank()}, 0)
    dist.barrier()
    return None if dist.get_rank() == 0 else list(states)


def test_a_dst_that_never_iterates_keeps_nobody_waiting(ranks2):
    assert ranks2.run(gather_without_iterating, deadline=15) == [None, []]


def count_loads():
    states = gather_state_dicts({"rank": dist.get_rank(), "weight": torch.ones(2)}, 0)
    loads, original = [], torch.load

    def recording(*args, **kwargs):
        loads.append(kwargs["weights_only"])
        return original(*args, **kwargs)

    seen = []
    with replaced(torch, "load", recording):
        for state in states:
            seen.append((state["rank"], len(loads), state["weight"].device.type))
    return seen, all(loads)


def test_dicts_are_decoded_one_at_a_time_in_rank_order(ranks2):
    assert ranks2.run(count_loads) == [([(0, 1, "cpu"), (1, 2, "cpu")], True), ([], True)]


def gather_an_unencodable_state():
    state = {"rank": dist.get_rank()} if dist.get_rank() != 1 else {"fn": lambda: None}
    ended = outcome(gather_state_dicts, state, 0)
    dist.barrier()
    return ended


def test_a_state_that_cannot_be_sent_raises_on_every_member(ranks4):
    ended = ranks4.run(gather_an_unencodable_state, deadline=15)
    assert ended.pop(1)[0] not in ("value", "RuntimeError")
    assert all(kind == "RuntimeError" and "state of rank 1 cannot be sent" in text for kind, text in ended)


def gather_an_unencodable_state_in_a_sub_group():
    group = dist.new_group([2, 3])
    state = {"fn": lambda: None} if dist.get_rank() == 3 else {}
    return outcome(gather_state_dicts, state, 2, group) if dist.get_rank() > 1 else None


def test_a_failing_member_of_a_sub_group_is_named_by_its_global_rank(ranks4):
    kind, text = ranks4.run(gather_an_unencodable_state_in_a_sub_group, deadline=15)[2]
    assert kind == "RuntimeError" and "state of rank 3 cannot be sent" in text


def check_single_process():
    assert gather_bytes(b"abc", 0) == [bytearray(b"abc")]
    weight = torch.ones(2)
    (state,) = gather_state_dicts({"weight": weight}, 0)
    state["weight"][0] = 5
    assert weight.tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"in the group \[0\], got 1"):
        gather_bytes(b"abc", 1)
    with pytest.raises(ValueError, match="chunk_bytes must be positive"):
        gather_bytes(b"abc", 0, chunk_bytes=-1)


def test_a_single_process_gets_copies_of_its_own(group_of_one):
    check_single_process()
    dist.destroy_process_group()
    check_single_process()


def test_a_single_process_raises_the_encoding_error_at_the_call():
    kind, _ = outcome(gather_state_dicts, {"fn": lambda: None}, 0)
    assert kind not in ("value", "RuntimeError")


def test_a_launch_without_a_group_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call in (gather_bytes, gather_state_dicts):
        with pytest.raises(RuntimeError, match="no process group is set up"):
            call({} if call is gather_state_dicts else b"", 0)
