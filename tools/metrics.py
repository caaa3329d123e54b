"""Numbers of a run on rank 0: one JSON line per logged step, TensorBoard, and a plot of the loss."""

import json
import math
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Metrics:
    """Writes `metrics.jsonl`, `tensorboard/` and, when closed, `loss.png` into a folder.

    `after`: the step that the run goes on from. Lines up to it stay, later ones are of steps that are done
    again and go. Without it what is there goes.
    """

    def __init__(self, folder: Path, *, after: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self.folder, lines = folder, folder / "metrics.jsonl"
        self.rows = [row for row in read_rows(lines) if row["step"] <= after] if after else []
        fresh = lines.with_suffix(".tmp")
        fresh.write_text("".join(_line(row) for row in self.rows), encoding="utf-8")
        os.replace(fresh, lines)
        self._lines = lines.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1 if after else None)

    def log(self, step: int, **values: float) -> None:
        """One line; a value that is not finite is null, as JSON has no other way to say it."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.rows.append({"step": step, **finite})
        self._lines.write(_line(self.rows[-1]))
        self._lines.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._lines.close()
        self._board.close()
        if self.rows:
            try:
                plot_loss(self.rows, self.folder / "loss.png")
            except OSError as e:  # a picture is not worth the weights that are still to be saved
                print(f"warning: no plot: {e}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


Row = dict[str, Any]


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def read_rows(path: Path) -> list[Row]:
    """The whole lines of a file of metrics; a process that was killed may have left a part of one."""
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def plot_loss(rows: list[Row], path: Path) -> None:
    """Loss over steps as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    losses = [math.nan if row["loss"] is None else row["loss"] for row in rows]
    axes.plot([row["step"] for row in rows], losses, marker="o", markersize=3)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="training loss")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def peak_memory_gb() -> float:
    """Largest memory of this process so far, in GB: of its GPU when it has one, of the host otherwise."""
    import resource

    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9
