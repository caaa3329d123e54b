"""The processes of one run: start them, and let an error on any of them be said once and end all of them."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from usp.mesh.agree import agree, gather_objects

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that torchrun started (or alone)."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def checked(self, fn: Callable[[], T]) -> T:
        """Run `fn` on every rank; a ValueError, OSError or failing exit on any of them ends all of them.

        Rank 0 prints the message, once. One exchange of short strings over gloo, so that a fault that only
        one rank can see (a file missing on one node) cannot leave the others waiting.
        """
        try:
            return agree(lambda: _without_exit(fn), dist.group.WORLD)
        except (ValueError, OSError) as e:
            text = str(e)
            if self.first and text:
                print(
                    f"error on {text}" if text.startswith("rank") else f"error: {text}",
                    file=sys.stderr,
                    flush=True,
                )
        raise SystemExit(1)  # up through whatever has files to close; `leave` ends the process

    def exchange(self, value: T) -> list[T]:
        """`value` of every rank, on every rank."""
        return gather_objects(value, dist.group.WORLD)

    def leave(self, code: int = 0) -> None:
        """End this process's part of the run with `code`; alone, go on when it is 0.

        Among several processes the interpreter is not taken down: a gloo thread may still be releasing the
        tensors of its last collective, and one that wants the interpreter then aborts a run that was good.
        """
        self.exchange(
            None
        )  # the launcher ends all once one has failed: not before rank 0 has closed its files
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.world > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        if code:
            raise SystemExit(code)


def _without_exit(fn: Callable[[], T]) -> T:
    """A failing exit, as of the argument parser, as an error without a text: it has said what is wrong."""
    try:
        return fn()
    except SystemExit as e:
        if not e.code:
            raise
        raise ValueError from None


def start() -> Ranks:
    """Join the processes torchrun started, with NCCL for GPUs and gloo for the host; alone, do nothing.

    Ends all of them when there are more processes than GPUs.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    gpu, local = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu and local < torch.cuda.device_count():
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    ranks = Ranks(rank=rank, world=world, device=device)
    try:
        ranks.checked(lambda: has_device(device))
    except SystemExit:
        ranks.leave(1)
    return ranks


def has_device(device: torch.device) -> None:
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise ValueError(
            f"nproc-per-node={os.environ.get('LOCAL_WORLD_SIZE')} must be at most the GPUs of this machine, "
            f"got {torch.cuda.device_count()} GPUs. Start fewer processes on it."
        )
