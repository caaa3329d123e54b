"""Gloo ranks that live as long as the test session."""

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def two() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.stop()
