"""distributed_run: who sets the group up, who takes it down, on which device, and how each ending looks outside."""

import os
import sys
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from outcomes import fail, outcome
from ranks import run_processes

from fxshard.distributed import DistributedState, distributed_run
from fxshard.distributed.run import abort

LONG = timedelta(seconds=50)
BUFFERED = {"PYTHONUNBUFFERED": None}  # what is printed waits in the process until it is flushed


def fields(state):
    return state.rank, state.world_size, str(state.device)


def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


# --- no launch ---------------------------------------------------------------------------------------------------


def test_without_a_launch_no_group_is_made_and_a_timeout_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with distributed_run(timeout=LONG, device="cpu") as state:
            assert isinstance(state, DistributedState) and fields(state) == (0, 1, "cpu") and state.is_main
            assert not dist.is_initialized()


def test_a_group_of_one_that_the_body_made_is_destroyed_at_the_end():
    with distributed_run(device="cpu"):
        group_of_one()
    assert not dist.is_initialized()


@pytest.mark.parametrize("error", [ValueError("v"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_group_of_one_that_the_body_made_is_destroyed_on_an_exception(error):
    with pytest.raises(type(error)) as caught, distributed_run(device="cpu"):
        group_of_one()
        raise error
    assert caught.value is error and not dist.is_initialized()


def test_a_group_that_the_body_destroyed_is_no_error():
    with distributed_run(device="cpu"):
        group_of_one()
        dist.destroy_process_group()


@pytest.mark.parametrize("error", [None, ValueError("v"), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("launch", [False, True])
def test_a_callers_group_of_one_stays_and_its_timeout_is_silent(monkeypatch, error, launch):
    if launch:
        monkeypatch.setenv("WORLD_SIZE", "2")
    group_of_one()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kind, _ = outcome(run_body, (lambda: None) if error is None else fail(error))
        assert kind == ("value" if error is None else type(error).__name__)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def run_body(body, timeout=LONG):
    with distributed_run(timeout=timeout, device="cpu") as state:
        body()
    return fields(state)


# --- devices -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    """Set whether CUDA seems available; records the device that is bound instead of binding it."""
    bound = []

    def seems(available):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "set_device", bound.append)
        return bound

    return seems


def launch(monkeypatch, local_rank="1"):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)


def device_of_run(device):
    """The device of a run in a caller's group of one: like a launch's, without a peer."""
    group_of_one()
    try:
        with distributed_run(device=device) as state:
            return str(state.device)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "device, available, expected",
    [
        (None, False, "cpu"),
        (None, True, "cuda"),
        ("cpu", True, "cpu"),
        ("cuda", True, "cuda"),
        ("cuda:3", True, "cuda:3"),
        ("meta", False, "meta"),
    ],
)
def test_without_a_launch_the_device_is_the_one_asked_for_and_is_not_bound(cuda, device, available, expected):
    bound = cuda(available)
    with distributed_run(device=device) as state:
        assert str(state.device) == expected and not dist.is_initialized()
    assert bound == []


@pytest.mark.parametrize(
    "device, available, expected",
    [
        (None, True, "cuda:1"),
        (None, False, "cpu"),
        ("cuda", True, "cuda:1"),
        ("cuda:1", True, "cuda:1"),
        (torch.device("cuda", 1), True, "cuda:1"),
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
    ],
)
def test_a_launch_binds_the_device_of_its_local_rank(monkeypatch, cuda, device, available, expected):
    bound = cuda(available)
    launch(monkeypatch)
    assert device_of_run(device) == expected
    assert [str(each) for each in bound] == ([expected] if expected.startswith("cuda") else [])


@pytest.mark.parametrize(
    "device, available, error, message",
    [
        ("cuda:0", True, ValueError, "'cuda:0' was asked for, but this rank's launch binds 'cuda:1'"),
        ("cuda", False, RuntimeError, "CUDA is not available"),
        ("cuda:0", False, RuntimeError, "CUDA is not available"),
        ("meta", True, ValueError, "got device 'meta'"),
        ("mps", False, ValueError, "got device 'mps'"),
        ("nonsense", False, ValueError, "'nonsense' names no device"),
    ],
)
def test_a_launch_refuses_other_devices_and_leaves_no_group(monkeypatch, cuda, device, available, error, message):
    bound = cuda(available)
    launch(monkeypatch)
    with pytest.raises(error, match=message), distributed_run(device=device):
        pytest.fail("the block must not run")
    assert bound == [] and not dist.is_initialized()


def test_cuda_that_is_not_there_is_refused_without_a_launch_too(cuda):
    cuda(False)
    with pytest.raises(RuntimeError, match="CUDA is not available"), distributed_run(device="cuda"):
        pytest.fail("the block must not run")


def test_without_a_local_rank_the_global_rank_picks_the_device_with_a_warning(monkeypatch, cuda):
    bound = cuda(True)
    launch(monkeypatch, local_rank=None)
    with pytest.warns(UserWarning, match="LOCAL_RANK is not set.*global rank 0"):
        assert device_of_run("cuda") == "cuda:0"  # the live group's rank, not the environment's
    assert [str(each) for each in bound] == ["cuda:0"]
    with pytest.warns(UserWarning, match="global rank 3"), pytest.raises(ValueError, match="binds 'cuda:3'"):
        distributed_run(device="cuda:1").__enter__()


def test_a_malformed_local_rank_is_refused_with_its_value(monkeypatch, cuda):
    cuda(True)
    launch(monkeypatch, local_rank="one")
    with pytest.raises(ValueError, match="LOCAL_RANK must be an integer, got 'one'"):
        distributed_run().__enter__()


def test_a_cpu_launch_needs_no_local_rank(monkeypatch, cuda):
    cuda(True)
    launch(monkeypatch, local_rank=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device_of_run("cpu") == "cpu"


def test_a_timeout_of_another_type_is_refused():
    with pytest.raises(ValueError, match=r"timeout must be a datetime.timedelta or None, got 30"):
        distributed_run(timeout=30).__enter__()


# --- a caller's group of several ranks ---------------------------------------------------------------------------


def run_in_callers_group(launched):
    if launched:
        os.environ["WORLD_SIZE"] = "2"
    try:
        ended = [outcome(run_body, body, None) for body in (int, fail(ValueError("v")), fail(SystemExit(3)))]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_body(int)
    finally:
        os.environ.pop("WORLD_SIZE", None)
    dist.barrier()
    return ended, [str(each.message) for each in caught]


@pytest.mark.parametrize("launched", [False, True])
def test_a_callers_group_survives_every_ending_and_a_timeout_warns(ranks2, launched):
    for rank, (ended, messages) in enumerate(ranks2.run(run_in_callers_group, launched, deadline=15)):
        assert ended == [("value", (rank, 2, "cpu")), ("ValueError", "v"), ("SystemExit", 3)]
        assert len(messages) == 1 and "cannot be applied" in messages[0]


# --- launches ----------------------------------------------------------------------------------------------------


def run_with_a_slow_peer():
    with distributed_run(timeout=LONG, device="cpu") as state:
        with distributed_run() as inner:  # finds the outer's group and leaves it alone
            assert fields(inner) == fields(state)
        backend = dist.get_backend()
        if state.rank == 1:
            time.sleep(1.5)
    return fields(state), backend, dist.is_initialized()


def test_a_launch_owns_its_group_and_a_normal_exit_waits_for_a_slow_peer():
    exits = run_processes(run_with_a_slow_peer, 2)
    assert [exit.value for exit in exits] == [((rank, 2, "cpu"), "gloo", False) for rank in range(2)]
    assert min(exit.seconds for exit in exits) > 1.4


def enter_alone():
    with distributed_run(timeout=timedelta(seconds=2)):
        pass


def test_an_absent_peer_is_an_error_near_the_timeout():
    (alone,) = run_processes(enter_alone, 1, env={"WORLD_SIZE": "2"})
    assert alone.code == 1 and alone.exception is not None
    assert 1.5 < alone.seconds < 20


def raise_while_the_peer_waits():
    with distributed_run(timeout=LONG) as state:
        dist.barrier()
        print("out", end="")  # unflushed when the rank aborts
        if state.rank == 1:
            print("err", end="", file=sys.stderr)
            raise ValueError("the body failed")
        dist.barrier()


def test_a_rank_whose_body_raises_leaves_at_once_and_takes_its_peer_along():
    peer, failed = run_processes(raise_while_the_peer_waits, 2, env=BUFFERED)
    assert failed.code == 1 and failed.exception is None, "aborts instead of propagating"
    assert "ValueError: the body failed" in failed.stderr and "err" in failed.stderr and failed.stdout == "out"
    assert peer.code != 0
    assert max(peer.seconds, failed.seconds) < LONG.total_seconds() / 2


def exit_everywhere():
    try:
        with distributed_run(timeout=LONG):
            sys.exit(6)
    finally:
        print(dist.is_initialized())


def test_an_exit_of_every_rank_destroys_the_group_and_keeps_the_code():
    exits = run_processes(exit_everywhere, 2)
    assert [(exit.code, exit.exception, exit.stdout) for exit in exits] == [(6, "SystemExit", "False\n")] * 2
    assert max(exit.seconds for exit in exits) < LONG.total_seconds() / 2


def exit_alone():
    with distributed_run(timeout=timedelta(seconds=3)) as state:
        if state.rank == 0:
            sys.exit(5)
        time.sleep(6)


def test_a_lone_exit_waits_for_the_timeout_then_leaves_with_its_code():
    exiter, peer = run_processes(exit_alone, 2)
    assert exiter.code == 5 and 2.5 < exiter.seconds < peer.seconds
    assert "not every rank reached the end" in exiter.stderr
    assert peer.code == 0 and "not every rank reached the end" in peer.stderr


def abort_with_a_closed_stdout():
    os.close(1)
    sys.stdout.write("nowhere")
    sys.stderr.write("last words")
    abort()


def test_abort_needs_no_exception_and_survives_a_closed_stream():
    (exit,) = run_processes(abort_with_a_closed_stdout, 1, env=BUFFERED)
    assert exit.code == 1 and "last words" in exit.stderr and "rank 0 of 1 aborts" in exit.stderr
    assert "NoneType" not in exit.stderr
