"""Numbers of a run on rank 0: one JSON line per logged step, TensorBoard, and a plot of the loss."""

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Self


class Metrics:
    """Writes `metrics.jsonl`, `tensorboard/` and, when closed, `loss.png` into a folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.rows: list[dict[str, float]] = []
        self._lines = (folder / "metrics.jsonl").open("w", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, **values: float) -> None:
        self.rows.append({"step": step, **values})
        self._lines.write(json.dumps(self.rows[-1]) + "\n")
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


def plot_loss(rows: list[dict[str, float]], path: Path) -> None:
    """Loss over steps as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], marker="o", markersize=3)
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
