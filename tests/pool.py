"""Living gloo ranks: started once, then any number of checks run on them."""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from tests.forked import forked
from tests.gloo import share_transport


def _crash_file(folder: str, rank: int) -> Path:
    """Where a rank that is killed by a signal says which calls its threads were in."""
    return Path(folder) / f"crash-{rank}"


def _serve(rank: int, world_size: int, folder: str, threads: int, pipe: Connection) -> None:
    faulthandler.enable(_crash_file(folder, rank).open("w"))
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    share_transport(threads)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=180),
    )
    while (job := pipe.recv()) is not None:
        fn, args = job
        try:
            pipe.send((fn(*args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


class Pool:
    """`world_size` gloo ranks. `pool.run(fn, *args)` calls a module-level `fn(*args)` on each of them.
    `threads`: see `tests.gloo`."""

    def __init__(self, world_size: int, threads: int = 2) -> None:
        self.world_size, self._threads = world_size, threads
        self._children: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
        """Results in rank order. When a rank fails or `timeout` seconds pass, all ranks are ended, and the
        AssertionError holds the traceback of each that failed; the next call starts new ones."""
        if not self._children:
            self._start()
        for pipe in self._pipes:
            pipe.send((fn, args))
        results, errors = self._collect(timeout)
        if errors:
            self.stop()
            raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))
        return [results[rank] for rank in range(self.world_size)]

    def _start(self) -> None:
        context = forked()
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (rank, self.world_size, self._folder.name, self._threads, theirs)
            child = context.Process(target=_serve, args=args, daemon=True)
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)

    def _collect(self, timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        end = time.monotonic() + timeout
        while len(results) + len(errors) < self.world_size and time.monotonic() < end:
            for rank, pipe in enumerate(self._pipes):
                if rank in results or rank in errors or not pipe.poll(0.002):
                    continue
                try:
                    result, error = pipe.recv()
                except EOFError:
                    self._children[rank].join(2.0)
                    result, error = None, self._how_it_ended(rank)
                if error is None:
                    results[rank] = result
                else:
                    errors[rank] = error
                    end = min(end, time.monotonic() + 2.0)  # the others may wait for it for ever
        if not errors and len(results) < self.world_size:
            late = sorted(set(range(self.world_size)) - set(results))
            errors = dict.fromkeys(late, f"no result within {timeout} s")
        return results, errors

    def _how_it_ended(self, rank: int) -> str:
        assert self._folder is not None
        stacks = _crash_file(self._folder.name, rank).read_text()
        return f"ended with exit code {self._children[rank].exitcode}\n{stacks}"

    def stop(self) -> None:
        for child in self._children:
            child.kill()
            child.join()
        for pipe in self._pipes:
            pipe.close()
        self._children, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def pool_of(ranks: int, scope: Literal["module", "session"] = "module", threads: int = 2) -> Any:
    """A fixture: so many ranks for all tests of a module, or of a session."""

    @pytest.fixture(scope=scope)
    def pool() -> Iterator[Pool]:
        started = Pool(ranks, threads)
        yield started
        started.stop()

    return pool
