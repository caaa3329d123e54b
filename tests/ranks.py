"""One launcher for tests on several gloo ranks: free port, timeout, and the child's own traceback."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.forked import forked
from tests.gloo import share_transport


def _child(
    rank: int, world_size: int, folder: str, backend: str, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        else:
            share_transport()
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        result = fn(rank, world_size, *args)
        torch.save(result, Path(folder) / f"{rank}.out")
        dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"{rank}.err").write_text(traceback.format_exc())
        os._exit(1)  # a peer may sit in a collective: leave at once, the parent reports


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, backend: str = "gloo"
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on `world_size` ranks and return their results in rank order.

    `fn` is a module-level function. A failing rank raises here with the traceback of every rank that failed;
    ranks still running after `timeout` seconds, or after another one failed, are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = forked() if backend == "gloo" else mp.get_context("spawn")  # CUDA does not survive a fork
        children = [
            context.Process(target=_child, args=(rank, world_size, folder, backend, fn, args), daemon=True)
            for rank in range(world_size)
        ]
        for child in children:
            child.start()
        _wait(children, timeout)
        errors = sorted(Path(folder).glob("*.err"))
        if errors:
            raise AssertionError("\n".join(f"rank {e.stem}:\n{e.read_text()}" for e in errors))
        missing = [r for r in range(world_size) if not (Path(folder) / f"{r}.out").exists()]
        if missing:
            raise AssertionError(f"ranks {missing} gave no result within {timeout} s")
        return [torch.load(Path(folder) / f"{r}.out", weights_only=False) for r in range(world_size)]


def _wait(children: list[Any], timeout: float) -> None:
    import time

    end = time.monotonic() + timeout
    while time.monotonic() < end and any(c.is_alive() for c in children):
        if any(c.exitcode not in (None, 0) for c in children):
            time.sleep(1.0)  # let the others write their own traceback
            break
        time.sleep(0.02)
    for child in children:
        if child.is_alive():
            child.kill()
        child.join()
