"""A thread beside each rank: it shows the others that the process lives, and ends it when it is stuck."""

import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from torch.distributed.distributed_c10d import Store

BEAT = 1.0  # seconds between two signs of life
EXIT_CODE = 128 + signal.SIGTERM
"""Of a run that SIGTERM ended and that can be resumed: 143, as shells have it."""
TOLD = "SIGTERM"
"""What a rank leaves word of that it ended at once, before it had anything to lose."""
SPARE = 30.0  # seconds after which the interpreter's own timer ends a process whose threads cannot run


def end_at_once() -> NoReturn:
    """For SIGTERM, with nothing to lose."""
    if int(os.environ.get("RANK", "0")) == 0:
        os.write(2, b"ended by SIGTERM before the first step; --resume starts there\n")
    os._exit(EXIT_CODE)


class Watch:
    """Signs of life in `store`, and a limit in seconds for work that is said to be limited."""

    def __init__(self, store: Store, rank: int, world: int, *, limit: float) -> None:
        self.rank, self.world, self.limit = rank, world, limit
        self.what = "the start"
        self.began = time.monotonic()
        self._until: float | None = None
        self._store = store
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def doing(self, what: str, *, limited: bool = False) -> None:
        """Begin something; limited work that is not followed by the next in time ends this process."""
        self.what, self.began = what, time.monotonic()
        self._until = time.monotonic() + self.limit if limited else None
        if limited:
            faulthandler.dump_traceback_later(self.limit + SPARE, exit=True)
        else:
            faulthandler.cancel_dump_traceback_later()

    def tell(self, text: str) -> None:
        """Leave word for the other ranks why this one ends."""
        with suppress(RuntimeError):  # whoever keeps the words may have ended too
            self._store.set(f"told/{self.rank}", text.encode("utf-8", "backslashreplace").decode())

    def others(self) -> tuple[dict[int, str], list[int], dict[int, str]]:
        """What ranks that ended have said; the ranks that gave no sign of life just now; what the rest do."""
        try:
            before = self._beats()
            time.sleep(2.5 * BEAT)
            after = self._beats()
            told = {
                rank: self._store.get(f"told/{rank}").decode()
                for rank in range(self.world)
                if self._store.check([f"told/{rank}"])
            }
        except RuntimeError:
            return {}, [], {}
        ranks = [rank for rank in range(self.world) if rank != self.rank and rank not in told]
        silent = [rank for rank in ranks if before[rank] == after[rank]]
        busy = {rank: after[rank].partition(" ")[2] for rank in ranks if rank not in silent}
        return told, silent, busy

    def _beats(self) -> list[str]:
        names = [f"beat/{rank}" for rank in range(self.world)]
        return [self._store.get(name).decode() if self._store.check([name]) else "" for name in names]

    def _run(self) -> None:
        count = 0
        while True:
            count += 1
            with suppress(RuntimeError):  # the store's host has ended: the collectives will say so
                self._store.set(f"beat/{self.rank}", f"{count} {self.what}")
            until = self._until  # read once: the main thread sets it
            if until is not None and time.monotonic() > until:
                what = f"{self.what} must take at most {self.limit:g} s (twice --timeout)"
                self.tell(what)
                print(f"error on rank {self.rank}: {what}. Its threads were at:", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(file=sys.stderr)
                os._exit(1)
            time.sleep(BEAT)
