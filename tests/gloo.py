"""Gloo groups that share one transport: each of its own would wake a thread every hundredth of a second."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d


def share_transport(threads: int = 2) -> None:
    """For all groups that this process makes from now on: a test session makes a hundred. `threads` of each
    group run its collectives; two is what a user has."""
    real: Any = distributed_c10d.ProcessGroupGloo
    device = real.create_device(interface="lo")

    class Sharing(real):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = real._Options()
            options._devices, options._timeout, options._threads = [device], timeout, threads
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Sharing  # type: ignore[misc]
