"""What a Chrome trace of one step says: how long the stream that computes stood still, and what it ran."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
MOST = 20  # kernels that a report names


class Work(NamedTuple):
    """Milliseconds, and the kernel's name."""

    start: float
    stop: float
    name: str


class Stream(NamedTuple):
    """One stream of a GPU, in milliseconds from its first work to the end of its last."""

    name: str
    span: float
    busy: float
    kernels: dict[str, float]
    """Milliseconds by kernel, the longest first."""

    @property
    def waits(self) -> float:
        """The share of the span in which nothing ran."""
        return 1 - self.busy / self.span if self.span else 0.0


def work_of(trace: Path) -> dict[str, list[Work]]:
    """What each stream ran, from the first on. Nothing for a trace without a GPU."""
    found: dict[str, list[Work]] = defaultdict(list)
    for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in WORK:
            start = event["ts"] / 1e3
            found[str(_stream(event))].append(Work(start, start + event["dur"] / 1e3, event["name"]))
    return {name: sorted(work) for name, work in found.items()}


def streams(found: Mapping[str, Sequence[Work]]) -> list[Stream]:
    """The busiest first, which is the one that computes."""
    return sorted((_measure(name, work) for name, work in found.items()), key=lambda s: -s.busy)


def report(found: Sequence[Stream]) -> Iterator[str]:
    """Lines for people: each stream, and what takes longest on the one that computes, the first."""
    for stream in found:
        yield (
            f"stream {stream.name}: {stream.busy:.2f} of {stream.span:.2f} ms busy, waits {stream.waits:.1%}"
        )
    for name, took in list(found[0].kernels.items())[:MOST] if found else ():
        yield f"  {took:9.2f} ms  {name[:120]}"


def _stream(event: dict[str, Any]) -> Any:
    args = event.get("args", {})
    return args.get("stream", event.get("tid"))


def _measure(name: str, work: Sequence[Work]) -> Stream:
    """Work on one stream does not overlap, but for what the clocks round."""
    busy, end = 0.0, work[0].start
    kernels: dict[str, float] = defaultdict(float)
    for start, stop, kernel in work:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        kernels[kernel] += stop - start
    longest = dict(sorted(kernels.items(), key=lambda item: -item[1]))
    return Stream(name, end - work[0].start, busy, longest)
