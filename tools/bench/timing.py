"""Time and memory of what runs on a device, the same way for every contender."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from usp.tools.bench.job import Row
from usp.tools.garbage import frozen

SHORT = (4096, 6144)  # tokens of a rank: with two lengths everything is compiled for any
AHEAD = 40_000_000  # cycles of nothing, about 20 ms, in which the host gets ahead of the device


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def together(device: torch.device) -> None:
    """All ranks, and their devices, have come here."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    wait(device)


def largest(values: list[float], device: torch.device) -> list[float]:
    """The largest of each over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(x) for x in found]


def release(device: torch.device) -> None:
    """Let go what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def held(device: torch.device) -> int | None:
    """Bytes allocated now on the fullest rank; None on the CPU, which is not measured."""
    if device.type == "cpu":
        return None
    release(device)
    return int(largest([torch.cuda.memory_allocated(device)], device)[0])


def measure(step: Callable[[], Tensor], *, steps: int, warmup: int, device: torch.device) -> Row:
    """Steps one after the other, as in training: the host does not wait between them. Seconds of one step.

    A step returns this rank's part of the loss. `first`: the first step, compilation included. `host`: until
    the host has started a step's work. Time and memory are the largest of all ranks; memory is None on the
    CPU.
    """
    first, loss = None, torch.zeros(())
    for i in range(warmup):
        began = time.perf_counter()
        loss = step()
        wait(device)
        first = time.perf_counter() - began if i == 0 else first
    with frozen():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        together(device)
        began = time.perf_counter()
        for _ in range(steps):
            loss = step()
        host = (time.perf_counter() - began) / steps
        wait(device)
        seconds = (time.perf_counter() - began) / steps
    peak, reserved = 0.0, 0.0
    if device.type == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    seconds, host, peak, reserved = largest([seconds, host, peak, reserved], device)
    whole = loss.detach().to(device, torch.float64)
    if dist.is_initialized():
        dist.all_reduce(whole)
    return {
        "first": first, "seconds": seconds, "host": host, "steps": steps, "warmup": warmup,
        "loss": float(whole), "peak": int(peak) or None, "reserved": int(reserved) or None,
    }  # fmt: skip


def repeats(guess: float, most: int) -> tuple[int, int]:
    """(timed steps, warm-up steps of the same length) for a step of about `guess` seconds.

    The first step of a length locks buffers of the host, and compiles what only its size asks for (past 2^31
    entries indices are wider). Only a step so long that this hardly shows has no warm-up but `SHORT` ones.
    """
    steps = most if guess <= 0 else min(most, max(1, round(10 / guess)))
    return steps, 0 if guess > 120 else 1


class Timed(NamedTuple):
    """Milliseconds, medians: of the device's work (on the CPU of the whole call), and of the host's."""

    device: float
    host: float


def timed(
    fn: Callable[..., Any],
    device: torch.device,
    num: int = 10,
    warmup: int = 2,
    *,
    before: Callable[[], tuple[Any, ...]] = tuple,
) -> Timed:
    """A call, alone. On a GPU the host is let run ahead, so that its time does not count as the device's.

    before: makes the arguments of one call, which is not timed.
    """
    for _ in range(warmup):
        fn(*before())
    found: list[Timed] = []
    for _ in range(num):
        given = before()
        together(device)
        if device.type == "cpu":
            began = time.perf_counter()
            fn(*given)
            took = 1e3 * (time.perf_counter() - began)
            found.append(Timed(took, took))
            del given  # before the next is made
            continue
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(AHEAD)  # type: ignore[no-untyped-call]
        start.record()
        began = time.perf_counter()
        fn(*given)
        took = 1e3 * (time.perf_counter() - began)
        stop.record()
        torch.cuda.synchronize(device)
        del given
        found.append(Timed(float(start.elapsed_time(stop)), took))
    device_ms = statistics.median(t.device for t in found)
    host_ms = statistics.median(t.host for t in found)
    return Timed(*largest([device_ms, host_ms], device))
