"""SIGTERM: at once where nothing would be lost, otherwise a wish that all ranks grant at the same point."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

from usp.tools.ranks import Ranks
from usp.tools.watch import EXIT_CODE as EXIT_CODE
from usp.tools.watch import TOLD, Watch, end_at_once


class Stopped(BaseException):
    """SIGTERM, in work that all ranks give up at the same point. No error: what handles those lets it by."""


class Stop:
    """A context that takes SIGTERM, and has a thread for it: the main one may be waiting for other ranks.

    Until `begin` this process ends at once with `EXIT_CODE`. Then SIGTERM on any rank makes `agreed` true on
    all of them: `ask` begins an exchange of one number over gloo, `agreed` takes the result, so that between
    the two the host does not wait, and the device is not involved. After `finish` it is ignored.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.watch: Watch | None = None
        """By which the other ranks learn that this one was told to end."""
        self._at_once = True
        self._flag = torch.zeros((), dtype=torch.int32)
        self._work: dist.Work | None = None
        self._restore: list[Any] = []

    def begin(self, ranks: Ranks) -> None:
        """From here on something could be lost. Of all ranks: none ends at once when one has gone on."""
        self._at_once = False
        ranks.exchange(None)

    def finish(self) -> None:
        """The process is about to end by itself."""
        self._at_once = False

    def ask(self) -> None:
        self._flag.fill_(self.wanted)
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, async_op=True)

    def agreed(self) -> bool:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return bool(self._flag)

    def check(self) -> None:
        """Raise Stopped, on all ranks, once one of them was told to end."""
        self.ask()
        if self.agreed():
            raise Stopped

    def _take(self) -> None:
        self.wanted = True
        if self._at_once:
            self._end()

    def _end(self) -> None:
        if self.watch is not None:
            self.watch.tell(TOLD)
        end_at_once()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._take()

    def _listen(self, pipe: int) -> None:
        while data := os.read(pipe, 64):
            if signal.SIGTERM in data:
                self._take()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            ours, theirs = os.pipe()
            os.set_blocking(theirs, False)
            handler = signal.signal(signal.SIGTERM, self._handle)
            thread = threading.Thread(target=self._listen, args=(ours,), name="stop", daemon=True)
            self._restore = [handler, signal.set_wakeup_fd(theirs, warn_on_full_buffer=False), thread, ours]
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._restore:
            handler, wakeup, thread, ours = self._restore
            signal.signal(signal.SIGTERM, handler)
            os.close(signal.set_wakeup_fd(wakeup))
            thread.join()
            os.close(ours)
