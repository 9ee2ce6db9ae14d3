"""The test pool itself: values, tracebacks, deadlines, deaths and restarts."""

import os
import pickle
import sys
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, fake_world, run_processes


def rank_and_sum(value):
    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), total, torch.get_num_threads(), os.environ.get("WORLD_SIZE")


def fail_on_rank_1_after_a_collective():
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("the bad rank")
    raise KeyError("the other rank")


def fail_on_rank_1_only():
    if dist.get_rank() == 1:
        raise ValueError("left before the barrier")
    dist.barrier()


def sleep_on_rank_1():
    if dist.get_rank() == 1:
        time.sleep(600)


def die_on_rank_1():
    if dist.get_rank() == 1:
        os._exit(17)


def add_one(x):
    return x + 1


def compiled_graphs_of_add_one():
    graphs = []
    torch.compile(add_one, backend=lambda graph, inputs: graphs.append(graph) or graph)(torch.ones(2))
    assert is_compiled_in_add_one()
    return len(graphs)


def is_compiled_in_add_one():
    return bool(torch._dynamo.eval_frame._debug_get_cache_entry_list(add_one.__code__))


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(2, group_timeout=3.0)
    yield pool
    pool.close()


def test_values_come_back_in_rank_order(pool):
    assert pool.run(rank_and_sum, 3) == [(0, torch.tensor(7), 1, None), (1, torch.tensor(7), 1, None)]


def test_workers_are_reused_and_dynamo_is_reset_between_runs(pool):
    before = pool.run(os.getpid)
    assert pool.run(is_compiled_in_add_one) == [False, False]
    assert pool.run(compiled_graphs_of_add_one) == [1, 1]
    assert pool.run(is_compiled_in_add_one) == [False, False]
    assert pool.run(os.getpid) == before


def test_a_failing_run_shows_every_traceback_and_the_next_run_works(pool):
    with pytest.raises(AssertionError) as caught:
        pool.run(fail_on_rank_1_after_a_collective)
    text = str(caught.value)
    assert "rank 0: Traceback" in text and "KeyError: 'the other rank'" in text
    assert "rank 1: Traceback" in text and "ValueError: the bad rank" in text
    assert [value[0] for value in pool.run(rank_and_sum, 0)] == [0, 1]


def test_the_peer_of_a_failing_rank_shows_where_it_waited(pool):
    with pytest.raises(AssertionError) as caught:
        pool.run(fail_on_rank_1_only)
    text = str(caught.value)
    assert "ValueError: left before the barrier" in text
    assert "rank 0: Traceback" in text and "dist.barrier()" in text


def test_a_hang_fails_at_the_deadline_with_the_stack_of_the_hung_rank(pool):
    pool.run(os.getpid)
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)rank 0: returned.*rank 1: no answer within.*sleep_on_rank_1"):
        pool.run(sleep_on_rank_1, deadline=1.0)
    assert time.monotonic() - began < 5.0


def test_a_dead_rank_is_named_with_its_exit_code(pool):
    with pytest.raises(AssertionError, match=r"(?s)rank 1: died with exit code 17"):
        pool.run(die_on_rank_1)


def test_a_function_that_workers_cannot_import_is_refused_in_the_parent(pool):
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pool.run(lambda: None)


def end_in_different_ways():
    rank = int(os.environ["RANK"])
    print("out", rank)
    if rank == 0:
        return os.environ["WORLD_SIZE"], dist.is_initialized(), os.environ["EXTRA"]
    if rank == 1:
        raise ValueError("went wrong")
    sys.exit(7)


def sleep_for_long():
    time.sleep(600)


def test_fresh_processes_report_code_exception_message_and_output():
    first, second, third = run_processes(end_in_different_ways, 3, env={"EXTRA": "x"})
    assert (first.code, first.exception, first.value, first.stdout) == (0, None, ("3", False, "x"), "out 0\n")
    assert (second.code, second.exception, second.message) == (1, "ValueError", "went wrong")
    assert "ValueError: went wrong" in second.stderr
    assert (third.code, third.exception, third.message) == (7, "SystemExit", "7")


def test_a_fresh_process_that_hangs_is_killed_at_the_deadline():
    with pytest.raises(AssertionError, match=r"rank \[0\] of 1 processes still alive after 3.0 s"):
        run_processes(sleep_for_long, 1, deadline=3.0)


def test_a_fake_world_has_the_size_and_rank_asked_for_and_leaves_nothing_behind():
    with fake_world(1024, rank=5):
        assert (dist.get_world_size(), dist.get_rank()) == (1024, 5)
        dist.all_reduce(torch.ones(2))
    assert not dist.is_initialized()
