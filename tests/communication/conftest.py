"""Plain training is the oracle of every test here: each script is trained once."""

import functools
import json
from collections.abc import Callable, Sequence

import pytest
from micro_steps import Trained, train


@functools.cache
def _plain(script: str) -> Trained:
    return train("plain", (), json.loads(script))


@pytest.fixture(scope="session")
def plain() -> Callable[[Sequence[Sequence[str]]], Trained]:
    """What one process gets on the whole batches of a script."""
    return lambda script: _plain(json.dumps(script))
