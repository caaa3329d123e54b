"""SIGTERM as a wish that all ranks grant after the same step."""

import signal
import threading
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

EXIT_CODE = 128 + signal.SIGTERM
"""Of a run that SIGTERM ended and that can be resumed: 143, as shells have it."""


class Stop:
    """A context in which SIGTERM on any rank makes `agreed` true on all of them, after the same step.

    `ask` at the start of a step begins an exchange of one number over gloo, `agreed` at its end takes the
    result, so that the host does not wait for it and the device is not involved.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._before: Any = None
        self._flag = torch.zeros((), dtype=torch.int32)
        self._work: dist.Work | None = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True

    def ask(self) -> None:
        self._flag.fill_(self.wanted)
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, async_op=True)

    def agreed(self) -> bool:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return bool(self._flag)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
