"""The processes of one run: start them, and let an error on any of them be said once and end all of them."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from usp.mesh.agree import agree, gather_objects
from usp.tools.watch import TOLD, Watch, end_at_once

T = TypeVar("T")
JOIN = 600  # seconds within which all ranks must have started
MAX_NAMED = 8  # ranks in one message
MOST_SECONDS = 10**7  # that a timer can be set to, some months


@dataclass(frozen=True)
class Ranks:
    """This process among those that torchrun started (or alone)."""

    rank: int
    world: int
    device: torch.device
    watch: Watch | None = None

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
            said = f"error on {text}" if text.startswith("rank") else f"error: {text}"
            _say(
                said if text else "error in the options: see the first lines", aloud=self.first and bool(text)
            )
        raise SystemExit(1)  # up through whatever has files to close; `leave` ends the process

    def exchange(self, value: T) -> list[T]:
        """`value` of every rank, on every rank."""
        return gather_objects(value, dist.group.WORLD)

    def doing(self, what: str, *, limited: bool = False) -> None:
        """What an error message will say this rank was at. `limited`: it may not take more than the time
        that the watch allows; then this process ends."""
        if self.watch is not None:
            self.watch.doing(what, limited=limited)

    def leave(self, code: int = 0) -> None:
        """End this process's part of the run with `code`; alone, go on when it is 0.

        Among several processes the interpreter is not taken down: a gloo thread may still be releasing the
        tensors of its last collective, and one that wants the interpreter then aborts a run that was good.
        """
        self.doing("the end of the run")
        try:
            # the launcher ends all once one has failed: not before rank 0 has closed its files
            self.exchange(None)
            if dist.is_initialized():
                dist.destroy_process_group()
        except RuntimeError as e:
            if not code:
                self.broken(e)
        if self.world > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        if code:
            raise SystemExit(code)

    def broken(self, error: BaseException) -> NoReturn:
        """End this process at once for an error that the others may not have: they may wait for it.

        The first rank with an error of its own says it. Those that lost contact name the ranks that said
        something, or are silent; the lowest of them says so.
        """
        if self.watch is None:
            raise error
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends it when another rank has ended
        what = f"{self.watch.what}: {type(error).__name__}: {_first_line(error)}"
        if not _lost_contact(error):
            self.watch.tell(what)
            traceback.print_exception(error)
            _say(f"error on rank {self.rank}: {what}")
        else:
            time.sleep(0.2 * min(self.rank, 5))
            told, silent, busy = self.watch.others()
            if TOLD in told.values():
                end_at_once()
            news = [f"rank {rank} ended: {text}" for rank, text in told.items()]
            news += [f"rank {rank} is not heard from any more" for rank in silent]
            if not news:  # all live: whoever is stuck says so itself when its own limit comes
                news = [f"rank {rank} still runs, at {text}" for rank, text in list(busy.items())[:MAX_NAMED]]
            if self.rank == min([self.rank, *busy]):
                at = f"error on rank {self.rank}: {self.watch.what}: lost contact after "
                at += f"{time.monotonic() - self.watch.began:.0f} s: "
                _say(f"{at}{'; '.join(news) or 'the launcher has ended'} ({_first_line(error)})")
        os._exit(1)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]


def _say(text: str, *, aloud: bool = True) -> None:
    """To the user, and to torchrun, whose summary of many lines then ends with it."""
    if aloud:
        print(text, file=sys.stderr, flush=True)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": more}}), "utf-8")


def _lost_contact(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(word in text for word in ("gloo", "nccl", "connection", "socket"))
    )


def _without_exit(fn: Callable[[], T]) -> T:
    """A failing exit as an error: with its text, or without one when the argument parser has said it."""
    try:
        return fn()
    except SystemExit as e:
        if not e.code:
            raise
        raise ValueError(*([e.code.removeprefix("error: ")] if isinstance(e.code, str) else [])) from None


def start(timeout: float = 600.0) -> Ranks:
    """Join the processes torchrun started, with NCCL for GPUs and gloo for the host; alone, do nothing.

    `timeout`: seconds that a collective may take; limited work may take twice as many. Ends all processes
    when there are more of them than GPUs.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    gpu, local = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu and local < torch.cuda.device_count():
        torch.cuda.set_device(device)
    watch = None
    if world > 1:
        store = _meet(rank, world)
        limit = timedelta(seconds=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world,
            timeout=limit,
        )
        watch = Watch(PrefixStore("watch", store.clone()), rank, world, limit=2 * timeout)
    ranks = Ranks(rank=rank, world=world, device=device, watch=watch)
    try:
        ranks.checked(lambda: has_device(device))
    except SystemExit:
        ranks.leave(1)
    return ranks


def _meet(rank: int, world: int) -> Any:
    """The store that all ranks share, once all have come to it; ends this process if some do not."""
    limit, here = timedelta(seconds=JOIN), "here/{}".format
    store: Any = None
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, world, timeout=limit)))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"attempt/{attempt}", store)  # the launcher's outlives a restart
        store.set(here(rank), "")
        store.wait([here(other) for other in range(world)], limit)
    except RuntimeError as e:
        late = [] if store is None else [other for other in range(world) if not store.check([here(other)])]
        who = f"ranks {late[:MAX_NAMED]} have" if late else "the others have"
        _say(f"error on rank {rank}: {who} not come within {JOIN} s ({_first_line(e)})")
        os._exit(1)
    return store


def has_device(device: torch.device) -> None:
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise ValueError(
            f"nproc-per-node={os.environ.get('LOCAL_WORLD_SIZE')} must be at most the GPUs of this machine, "
            f"got {torch.cuda.device_count()} GPUs. Start fewer processes on it."
        )


def can_wait(timeout: float) -> bool:
    """Whether a time limit can be that many seconds."""
    return 1 <= timeout <= MOST_SECONDS


class Timed(Protocol):
    """Options that say how long ranks wait for each other."""

    @property
    def timeout(self) -> float: ...


C = TypeVar("C", bound=Timed)


def on_ranks(cfg: C | None, refused: SystemExit | None, work: Callable[[C, Ranks], Any]) -> None:
    """Join the other ranks, carry out `work`, and end this process: 0, or the exit code that `work` returns.

    `cfg` is None where this rank refused its options, with `refused`; the others learn of it.
    """

    def options() -> C:
        if cfg is None:
            raise refused or SystemExit(1)
        return cfg

    ranks = start(cfg.timeout) if cfg is not None and can_wait(cfg.timeout) else start()
    code = 0
    try:
        result = work(ranks.checked(options), ranks)
        code = result if isinstance(result, int) else 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0
    except BaseException as e:
        ranks.broken(e)
    ranks.leave(code)
