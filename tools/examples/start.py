"""What every example starts with: the ranks that torchrun made, and each rank's own device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def ranks() -> Iterator[None]:
    """The process group, over NCCL where there are GPUs and over gloo where there are none."""
    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpus else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def say(text: str) -> None:
    """Print on the first rank alone."""
    if dist.get_rank() == 0:
        print(text, flush=True)
