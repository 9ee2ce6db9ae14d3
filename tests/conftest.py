"""Fixtures shared by all tests."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import ranks
from ranks import RankPool, reset_dynamo


def _pool(world_size: int) -> Iterator[RankPool]:
    pool = RankPool(world_size)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def ranks2() -> Iterator[RankPool]:
    """Two gloo ranks, shared by the tests of one file."""
    yield from _pool(2)


@pytest.fixture(scope="module")
def ranks3() -> Iterator[RankPool]:
    """Three gloo ranks, shared by the tests of one file."""
    yield from _pool(3)


@pytest.fixture(scope="module")
def ranks4() -> Iterator[RankPool]:
    """Four gloo ranks, shared by the tests of one file."""
    yield from _pool(4)


@pytest.fixture
def fake_world() -> Callable[..., AbstractContextManager[None]]:
    """`with fake_world(world_size, rank=0):` makes this process one rank of a world that moves no data."""
    return ranks.fake_world


@pytest.fixture(autouse=True)
def _no_compiled_code_outlives_a_test() -> Iterator[None]:
    yield
    reset_dynamo()
