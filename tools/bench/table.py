"""Rows as a table for people: one set of columns for each measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from usp.models.plan.settings import OPTIONS, Settings
from usp.tools.bench.job import GIB, Row, gib_above

NOTHING = "-"


class Column(NamedTuple):
    title: str
    text: Callable[[Row], object]
    where_it_differs: bool = False
    """Left out where it says the same of all rows."""

    def says(self, rows: Sequence[Row]) -> bool:
        said = {self.text(row) for row in rows}
        return not rows or (len(said) > 1 if self.where_it_differs else said != {NOTHING})


def number(name: str, pattern: str = ".1f", scale: float = 1.0) -> Callable[[Row], str]:
    """The field, scaled and formatted; NOTHING where it is missing."""

    def text(row: Row) -> str:
        value = row.get(name)
        if value is None:
            return NOTHING
        found = format(value * scale, pattern)
        small = value and float(found.rstrip("%")) == 0
        return format(value * scale, ".1%" if pattern.endswith("%") else ".2g") if small else found

    return text


def host(pattern: str, whole: str) -> Callable[[Row], str]:
    """The host's time, where it is not just that of the `whole` call, as on a CPU."""
    text = number("host_ms", pattern)
    return lambda row: NOTHING if row.get("host_ms") == row.get(whole) else text(row)


def word(name: str) -> Callable[[Row], object]:
    return lambda row: row.get(name, NOTHING)


def how(row: Row) -> str:
    """What of a step is kept and computed again."""
    if "again" in row:
        return f"{row['again']}; MLP by {row['mlp']}, loss by {row['loss_by']}"
    if "remat" not in row:
        return NOTHING
    given = {name: row[name] for name in (*OPTIONS, "moments") if name in row}
    if not isinstance(given["remat"], str):
        given["remat"] = tuple(given["remat"])
    return Settings(**given).describe()


def above(peak: str, base: str) -> Callable[[Row], str]:
    """GiB beyond parameters and moments."""

    def text(row: Row) -> str:
        value = gib_above(row, peak, base)
        return NOTHING if value is None else f"{value:.2f}"

    return text


_WHO = (Column("contender", word("contender")), Column("row", word("label")))
_LENGTH = Column("tokens", word("seq_len"))
_RATES = (
    Column("s/step", number("seconds", ".3f")),
    Column("tokens/s/GPU", number("tokens_per_s_gpu", ".0f")),
    Column("TFLOP/s/GPU", number("tflops_gpu")),
    Column("of peak", number("peak_share", ".1%")),
)
_PEAK = Column("peak GiB", number("peak", ".2f", 1 / GIB))

COLUMNS: Mapping[str, tuple[Column, ...]] = MappingProxyType(
    {
        "step": (
            *_WHO, Column("processes", word("world"), True), _LENGTH, Column("kernel", word("kernel")),
            *_RATES, _PEAK,
            Column("KiB/token", number("kib_per_local_token")), Column("waits", number("waits", ".1%")),
            Column("ours/it", number("ours_over", ".2f")), Column("how", how),
        ),
        "memory": (
            Column("rung", word("label")), _LENGTH, Column("window", word("window")),
            Column("peak above", above("peak", "base")),
            Column("foretold", above("foretold", "foretold_base")),
            Column("KiB/token", number("kib_per_local_token")),
            Column("tokens/s/GPU", number("tokens_per_s_gpu", ".0f")),
            Column("TFLOP/s/GPU", number("tflops_gpu")),
            Column("host GiB", number("host_bytes", ".1f", 1 / GIB)),
            Column("foretold", number("foretold_host", ".1f", 1 / GIB)), Column("how", how),
        ),
        "scaling": (
            Column("GPUs", word("world")), Column("scheme", word("label")), _LENGTH, *_RATES, _PEAK,
            Column("host GiB", number("host_bytes", ".1f", 1 / GIB)), Column("how", how),
        ),
        "kernel": (
            Column("kernel", word("kernel")), Column("mask", word("label")), _LENGTH,
            Column("forward ms", number("forward_ms", ".3f")),
            Column("backward ms", number("backward_ms", ".3f")),
            Column("forward TFLOP/s", number("forward_tflops")),
            Column("backward TFLOP/s", number("backward_tflops")),
        ),
        "exchange": (
            *_WHO, _LENGTH, Column("raw ms", number("raw_ms", ".3f")),
            Column("forward ms", number("forward_ms", ".3f")),
            Column("backward ms", number("backward_ms", ".3f")),
            Column("over raw", number("over_raw", ".2f")),
            Column("host ms", host(".3f", "forward_ms")),
        ),
        "scan": (
            Column("row", word("label")), _LENGTH, Column("scan ms", number("scan_ms", ".2f")),
            Column("loop ms", number("loop_ms", ".2f")), Column("over loop", number("over_loop", ".3f")),
            Column("scan host ms", number("scan_host_ms", ".2f")),
            Column("loop host ms", number("loop_host_ms", ".2f")),
            Column("scan GiB", number("scan_peak", ".2f", 1 / GIB)),
            Column("loop GiB", number("loop_peak", ".2f", 1 / GIB)),
        ),
        "passes": (
            Column("pass", word("label")), _LENGTH, Column("ms", number("ms", ".3f")),
            Column("MiB", number("nbytes", ".0f", 1 / 2**20)),
            Column("TB/s", number("bytes_per_s", ".2f", 1e-12)),
            Column("over a copy", number("over_floor", ".2f")), Column("host ms", host(".3f", "ms")),
        ),
        "loss": (
            Column("loss", word("label")), _LENGTH, Column("ms", number("ms", ".2f")),
            Column("over floor", number("over_floor", ".2f")), Column("host ms", host(".2f", "ms")),
            _PEAK,
        ),
    }
)  # fmt: skip


def table(what: str, rows: Sequence[Row]) -> str:
    """Columns for what was measured; a row that failed says why in their place."""
    done = [row for row in rows if "error" not in row]
    columns = [column for column in COLUMNS[what] if column.says(done)]
    named = [column for column in columns if column.text is not how]
    unit = "process" if any(row.get("device") == "cpu" for row in done) else "GPU"
    cells = [[column.title.replace("/GPU", f"/{unit}") for column in columns]]
    cells += [[str(column.text(row)) for column in columns] for row in done]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    for row in (row for row in rows if "error" in row):
        known = [str(c.text(row)) for c in named[:4] if c.text(row) != NOTHING]
        lines.append(f"{' '.join(known)}: {row['error']}")
    return "\n".join(lines)
