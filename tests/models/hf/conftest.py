"""Gloo ranks that live as long as the test session; the slow imports are paid once, before they fork."""

import tempfile
from collections.abc import Iterator

import pytest
import torch.multiprocessing as mp

from tests.pool import Pool, _serve

PRELOADED = ["torch", "transformers.modeling_utils", "usp.models.hf", "tests.models.hf.run_bridge"]


class ForkedPool(Pool):
    """As `Pool`, its ranks forked from one process that has imported and done nothing else."""

    def __init__(self, world_size: int, *more: str) -> None:
        super().__init__(world_size)
        self._preloaded = [*PRELOADED, *more]

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(self._preloaded)  # heard by the first pool of a session only
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (rank, self.world_size, self._folder.name, theirs)
            child = context.Process(target=_serve, args=args, daemon=True)
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)


@pytest.fixture(scope="session")
def two() -> Iterator[Pool]:
    pool = ForkedPool(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Pool]:
    pool = ForkedPool(4)
    yield pool
    pool.stop()
