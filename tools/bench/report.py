"""Runs as JSON: what was measured, on what, with which command; and the figures that rows have together."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from usp.tools.bench.job import Row
from usp.tools.flops import peak_flops

FORMAT = 1


class Run(NamedTuple):
    """One call of `usp bench`."""

    what: str
    command: str
    started: str  # UTC, ISO 8601
    machine: Row
    rows: list[Row]


def save(path: Path, run: Run) -> None:
    """Add a run to a file, which is there as a whole or not at all; what it held of this run before goes."""
    before = load(path) if path.exists() else []
    runs = [*(one for one in before if (one.started, one.command) != (run.started, run.command)), run]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    text = json.dumps({"format": FORMAT, "runs": [one._asdict() for one in runs]}, indent=1)
    fresh.write_text(text + "\n", encoding="utf-8")
    os.replace(fresh, path)


def load(path: Path) -> list[Run]:
    """Raises ValueError for a file that is not one of `save`."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}")
        return [Run(**one) for one in found["runs"]]
    except FileNotFoundError:
        raise ValueError(f"{path} must be a file, and is not there. Name another.") from None
    except KeyError as e:
        raise ValueError(
            f"{path} must be JSON written by usp bench, got none of its {e}. Name another."
        ) from None
    except (TypeError, ValueError) as e:
        raise ValueError(f"{path} must be JSON written by usp bench, got: {e}. Name another file.") from None


def joined(runs: Sequence[Run]) -> list[Row]:
    """Rows of all runs; of the same measurement the newest, unless only an older one came to an end. Shares
    are of what is left of a run."""
    found: dict[tuple[Any, ...], tuple[int, Row]] = {}
    names = ("what", "contender", "model", "layers", "window", "device", "world", "label", "seq_len", "batch")
    for i, row in ((i, row) for i, run in enumerate(runs) for row in run.rows):
        key = (*(row.get(name) for name in names), row.get("kernel") if row["what"] == "kernel" else "")
        if key not in found or "error" not in row:
            found[key] = i, row
    kept = [[row for of, row in found.values() if of == i] for i in range(len(runs))]
    shared = [
        iter(with_shares(rows, str(run.machine.get("device", ""))))
        for run, rows in zip(runs, kept, strict=True)
    ]
    return [next(shared[i]) for i, _ in found.values()]


def with_shares(rows: Sequence[Row], device: str) -> list[Row]:
    """Rows with the share of the device's peak, and peers' with ours over theirs.

    `ours_over`: our tokens/s over the peer's at the same length and variant, from the same run.
    """
    peak = peak_flops(device)
    ours = {
        (row["variant"], row["seq_len"]): row["tokens_per_s_gpu"]
        for row in rows
        if row["contender"] == "usp" and row.get("variant") and "tokens_per_s_gpu" in row
    }
    found = []
    for row in rows:
        row = {name: value for name, value in row.items() if name != "ours_over"}
        if peak and "tflops_gpu" in row:
            row["peak_share"] = row["tflops_gpu"] * 1e12 / peak
        own = ours.get((row.get("variant"), row.get("seq_len")))
        if row["contender"] != "usp" and own and "tokens_per_s_gpu" in row:
            row["ours_over"] = own / row["tokens_per_s_gpu"]
        found.append(row)
    return found
