"""Fixtures of the tests of passes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest


@pytest.fixture
def two_ranks(fake_world: Callable[..., AbstractContextManager[None]]) -> Iterator[None]:
    """This process is rank 0 of two for the test; collectives move nothing."""
    with fake_world(2):
        yield


@pytest.fixture
def four_ranks(fake_world: Callable[..., AbstractContextManager[None]]) -> Iterator[None]:
    """The same of four."""
    with fake_world(4):
        yield
