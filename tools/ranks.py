"""The processes of one run: start them, and let an error on any of them be said once and end all of them."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

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
        error: str | None = None
        value: list[T] = []
        try:
            value.append(fn())
        except (ValueError, OSError) as e:
            error = str(e)
        except SystemExit as e:  # the argument parser: it has said what is wrong
            if not e.code:
                raise
            error = ""
        self._agree(error)
        return value[0]

    def _agree(self, error: str | None) -> None:
        found = [(rank, text) for rank, text in enumerate(self.exchange(error)) if text is not None]
        if not found:
            return
        rank, text = found[0]
        if self.first and text:
            print(
                f"error: {text}" if rank == 0 else f"error on rank {rank}: {text}",
                file=sys.stderr,
                flush=True,
            )
        raise SystemExit(1)  # up through whatever has files to close; `leave` ends the process

    def exchange(self, value: T) -> list[T]:
        """`value` of every rank, on every rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

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
