"""Fixtures of the tests of ranks and groups."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from ranks import RankPool


# These tests leave nothing but sub-groups behind in a worker, so one pool serves all files of this folder.
@pytest.fixture(scope="package")
def ranks2() -> Iterator[RankPool]:
    """Two gloo ranks."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="package")
def ranks4() -> Iterator[RankPool]:
    """Four gloo ranks."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A gloo default group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_launch_and_no_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()
