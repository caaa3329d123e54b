"""A traced step drawn: what each stream of the GPU ran when, as a whole, and some milliseconds from near."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from usp.tools.bench.waits import Work, streams

KINDS: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType(
    {
        "all-to-all": (("SendRecv", "AllToAll"), "tab:red"),
        "gather": (("AllGather",), "tab:orange"),
        "scatter": (("ReduceScatter", "AllReduce"), "tab:brown"),
        "host copy": (("HtoD", "DtoH"), "tab:pink"),
        "attention": (("flash", "fmha", "sdpa"), "tab:blue"),
        "product": (("nvjet", "gemm", "cutlass"), "tab:green"),
    }
)
"""By parts of the kernels' names, the first that fits; what fits none is a pass over memory."""
PASS = ("pass", "tab:gray")
NEAR = 0.12  # share of the step that is drawn from near
MIDDLE = 0.75  # where that lies: in the backward


def kind_of(name: str) -> tuple[str, str]:
    """(kind, colour) of a kernel."""
    for kind, (parts, colour) in KINDS.items():
        if any(part in name for part in parts):
            return kind, colour
    return PASS


def draw(found: Mapping[str, Sequence[Work]], path: Path) -> bool:
    """False where nothing ran on a GPU, or matplotlib is not installed."""
    if not found or importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    by_work = streams(found)
    busiest = [stream.name for stream in by_work]
    begin = min(work[0].start for work in found.values())
    length = max(work[-1].stop for work in found.values()) - begin
    figure = Figure(figsize=(14, 2.5 + 0.8 * len(busiest)), layout="constrained")
    whole, near = figure.subplots(2, 1)
    waits = f"the stream that computes waits {by_work[0].waits:.1%} of it"
    said = f"{path.stem}: one step, {length:.0f} ms; {waits}"
    for axes, title in ((whole, said), (near, "from near")):
        for row, name in enumerate(busiest):
            _bars(axes, row, found[name], begin)
        axes.set_yticks(range(len(busiest)), [_named(name, found[name]) for name in busiest])
        axes.invert_yaxis()
        axes.set(title=title, xlabel="ms")
    whole.set_xlim(0, length)
    near.set_xlim((MIDDLE - NEAR / 2) * length, (MIDDLE + NEAR / 2) * length)
    seen = {kind_of(work.name) for each in found.values() for work in each}
    handles = [Patch(color=colour, label=kind) for kind, colour in sorted(seen)]
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)
    return True


def _named(stream: str, work: Sequence[Work]) -> str:
    """With the two kinds that it is busiest with."""
    took: dict[str, float] = defaultdict(float)
    for one in work:
        took[kind_of(one.name)[0]] += one.stop - one.start
    return f"{', '.join(sorted(took, key=lambda kind: -took[kind])[:2])} (stream {stream})"


def _bars(axes: Any, row: int, work: Sequence[Work], begin: float) -> None:
    spans = [(w.start - begin, w.stop - w.start) for w in work]
    axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=[kind_of(w.name)[1] for w in work], linewidth=0)
