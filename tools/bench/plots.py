"""Rows as pictures. matplotlib is asked for only here; without it rows can be drawn later, from the JSON."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from usp.tools.bench.job import GIB, Row, gib_above


class Panel(NamedTuple):
    """`y` over `x`, a line for each value of `by`; a bar for each where `x` is not a number."""

    title: str
    x: str
    y: Callable[[Row], float | None]
    by: tuple[str, ...]
    unit: str
    rows: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows
    grows: bool = False
    """By the length: drawn on a logarithmic scale."""


def field(name: str, scale: float = 1.0) -> Callable[[Row], float | None]:
    def value(row: Row) -> float | None:
        return None if row.get(name) is None else row[name] * scale

    return value


def above(peak: str, base: str) -> Callable[[Row], float | None]:
    return lambda row: gib_above(row, peak, base)


def same_per_gpu(rows: Sequence[Row]) -> Sequence[Row]:
    """As many tokens on each GPU as in the smallest row."""
    least = min((row["seq_len"] // row["world"] for row in rows), default=0)
    return [row for row in rows if row["seq_len"] == least * row["world"]]


def same_in_all(rows: Sequence[Row]) -> Sequence[Row]:
    """As many tokens as the longest row of the fewest GPUs has."""
    fewest = min((row["world"] for row in rows), default=0)
    whole = max((row["seq_len"] for row in rows if row["world"] == fewest), default=0)
    return [row for row in rows if row["seq_len"] == whole]


_WHO, _SCHEME, _TOKENS, _SPEED = ("contender", "label"), ("variant",), "seq_len", "model TFLOP/s per GPU"
PANELS: Mapping[str, tuple[Panel, ...]] = MappingProxyType(
    {
        "step": (
            Panel("speed", _TOKENS, field("tflops_gpu"), _WHO, _SPEED),
            Panel("memory", _TOKENS, field("peak", 1 / GIB), _WHO, "peak GiB per GPU"),
        ),
        "memory": (
            Panel("above parameters and moments", "label", above("peak", "base"), (_TOKENS,), "GiB"),
            Panel("foretold", "label", above("foretold", "foretold_base"), (_TOKENS,), "GiB"),
            Panel("speed", "label", field("tokens_per_s_gpu"), (_TOKENS,), "tokens/s per GPU"),
        ),
        "scaling": (
            Panel("as many tokens per GPU", "world", field("tflops_gpu"), _SCHEME, _SPEED, same_per_gpu),
            Panel("as many tokens in all", "world", field("tflops_gpu"), _SCHEME, _SPEED, same_in_all),
        ),
        "kernel": (
            Panel("forward", _TOKENS, field("forward_tflops"), ("kernel", "label"), "TFLOP/s"),
            Panel("backward", _TOKENS, field("backward_tflops"), ("kernel", "label"), "TFLOP/s"),
        ),
        "exchange": (
            Panel("over a raw all-to-all", _TOKENS, field("over_raw"), _WHO, "times"),
            Panel("forward", _TOKENS, field("forward_ms"), _WHO, "ms", grows=True),
            Panel("backward", _TOKENS, field("backward_ms"), _WHO, "ms", grows=True),
        ),
        "scan": (
            Panel("scan over loop", _TOKENS, field("over_loop"), ("label",), "times"),
            Panel("host time of the scan", _TOKENS, field("scan_host_ms"), ("label",), "ms"),
        ),
        "passes": (
            Panel("over a copy of the bytes", "label", field("over_floor"), (_TOKENS,), "times"),
            Panel("memory's speed", "label", field("bytes_per_s", 1e-12), (_TOKENS,), "TB/s"),
        ),
        "loss": (
            Panel("over the three products", "label", field("over_floor"), (_TOKENS,), "times"),
            Panel("memory", "label", field("peak", 1 / GIB), (_TOKENS,), "GiB"),
        ),
    }
)


OF_ONE_LAYER = ("kernel", "exchange", "loss", "passes")


def _by_processes(panel: Panel, rows: Sequence[Row]) -> Panel:
    """A line for each number of processes, too, where rows differ in it and it is not what they are over."""
    more = panel.x != "world" and len({row.get("world") for row in rows if "error" not in row}) > 1
    return panel._replace(by=(*panel.by, "world")) if more else panel


def plot(what: str, rows: Sequence[Row], path: Path) -> bool:
    """Draw the rows that were measured; False where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    on_cpu = any(row.get("device") == "cpu" for row in rows)
    drawable = [panel for panel in PANELS[what] if any(panel.y(row) is not None for row in rows)]
    panels = [_by_processes(panel, rows) for panel in drawable or PANELS[what][:1]]
    if on_cpu:
        panels = [panel._replace(unit=panel.unit.replace("GPU", "process")) for panel in panels]
    figure = Figure(figsize=(7 * len(panels), 5.5), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        drawn = [row for row in rows if panel.y(row) is not None and panel.x in row]
        draw(axes, panel, panel.rows(drawn))
    measured = next((row for row in rows if "error" not in row), None)
    if measured is not None:
        where = "CPU, " if measured["device"] == "cpu" else ""
        layers = "" if what in OF_ONE_LAYER else f", {measured['layers']} layers"
        figure.suptitle(f"{where}{measured['model']}{layers}: {what}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def draw(axes: Any, panel: Panel, rows: Sequence[Row]) -> None:
    numeric = all(isinstance(row[panel.x], int) for row in rows)
    names = list(dict.fromkeys(row[panel.x] for row in rows))
    keys = list(dict.fromkeys(tuple(row.get(name, "") for name in panel.by) for row in rows))
    for i, key in enumerate(keys):
        own = [row for row in rows if tuple(row.get(name, "") for name in panel.by) == key]
        label = " ".join(
            f"{word} processes" if by == "world" else str(word)
            for by, word in zip(panel.by, key, strict=True)
        )
        if numeric:
            own.sort(key=lambda row: row[panel.x])
            axes.plot([r[panel.x] for r in own], [panel.y(r) for r in own], marker="o", label=label)
        else:
            width = 0.8 / len(keys)  # of a group, whose middle is at its name
            at = [names.index(row[panel.x]) + (i - (len(keys) - 1) / 2) * width for row in own]
            axes.barh(at, [panel.y(row) for row in own], width, label=label)
    if numeric and rows:
        axes.set_xscale("log", base=2)
        axes.set(xlabel={"seq_len": "tokens in one row", "world": "GPUs"}.get(panel.x, panel.x))
        axes.set(ylabel=panel.unit, yscale="log" if panel.grows else "linear")
    else:
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set(xlabel=panel.unit)
    axes.set(title=panel.title)
    axes.grid(alpha=0.3)
    if keys:
        title = "tokens" if panel.by == (_TOKENS,) else None
        axes.legend(fontsize="small", title=title, framealpha=0.6)
