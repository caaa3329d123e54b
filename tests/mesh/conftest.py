"""Four ranks that live as long as the test session; smaller meshes take the first of them."""

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Four gloo ranks, started by the first test that needs them."""
    pool = Pool(4)
    yield pool
    pool.stop()
