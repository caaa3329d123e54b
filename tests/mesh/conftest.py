"""Ranks that live as long as the test session, by world size; one world at a time."""

from collections.abc import Callable, Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    live: dict[int, Pool] = {}

    def of(world_size: int) -> Pool:
        for other in [n for n in live if n != world_size]:
            live.pop(other).stop()
        return live.setdefault(world_size, Pool(world_size))

    yield of
    for one in live.values():
        one.stop()
