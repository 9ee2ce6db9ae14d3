"""Queries: what a process knows of its launch and of its group."""

import time

import pytest
import torch
import torch.distributed as dist

import fxshard.distributed as fd


def queries(group=None):
    return fd.rank(group), fd.size(group), fd.is_master(group)


def test_without_a_group_a_process_is_rank_0_of_1():
    assert fd.is_available() and not fd.is_initialized() and not fd.is_distributed_run()
    assert fd.backend() is None
    assert queries() == (0, 1, True)
    fd.barrier()


def test_without_torch_distributed_nothing_is_initialised(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    assert not fd.is_available() and not fd.is_initialized()
    assert queries() == (0, 1, True)
    assert not fd.is_fsdp2_model(torch.nn.Linear(1, 1))


def test_a_group_of_one_rank_is_initialised_but_no_run_of_several(group_of_one):
    assert fd.is_initialized() and not fd.is_distributed_run()
    assert (fd.backend(), *queries()) == ("gloo", 0, 1, True)
    fd.barrier()


@pytest.mark.parametrize("text, launch", [(None, False), ("", False), ("1", False), ("0", False), ("2", True)])
def test_a_launch_is_a_world_size_above_one_in_the_environment(monkeypatch, text, launch):
    if text is not None:
        monkeypatch.setenv("WORLD_SIZE", text)
    assert fd.is_distributed_launch() is launch
    assert not fd.is_distributed_run()


def test_a_malformed_world_size_is_refused_with_its_value(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(ValueError, match="WORLD_SIZE must be an integer, got 'four'"):
        fd.is_distributed_launch()


def query_sub_group():
    sub = dist.new_group([1, 3])
    return fd.is_distributed_launch(), fd.is_distributed_run(), fd.backend(), queries(), queries(sub)


def test_ranks_of_a_sub_group_count_from_0_and_non_members_see_minus_1(ranks4):
    launch, run, backend, *_ = zip(*ranks4.run(query_sub_group), strict=True)
    assert set(launch) == {False} and set(run) == {True} and set(backend) == {"gloo"}
    world, sub = zip(*[answer[3:] for answer in ranks4.run(query_sub_group)], strict=True)
    assert list(world) == [(0, 4, True), (1, 4, False), (2, 4, False), (3, 4, False)]
    assert list(sub) == [(-1, -1, False), (0, 2, True), (-1, -1, False), (1, 2, False)]


def wait_for_a_late_rank():
    began = time.monotonic()
    if dist.get_rank() == 3:
        time.sleep(0.5)
    fd.barrier()
    return time.monotonic() - began


def test_a_barrier_waits_for_the_last_rank(ranks4):
    assert min(ranks4.run(wait_for_a_late_rank)) > 0.4
