"""Twenty steps by every entry point on two ranks, against Transformers' own Trainer on one process.

    python -m usp.tools.bench.curves

Writes results/hf-curves.json and .png, and prints how far each entry point is from the reference. What is
trained is described in `usp.tools.bench.entries`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro

from usp.tools.bench.entries import ENTRIES, MESHES, PARTS, ROWS, STEPS, Curve, references, save_model

RESULTS = Path(__file__).parent / "results"


def main(*, out: Path = RESULTS, work: Path | None = None) -> None:
    """Train by every entry point, compare and draw.

    out: where hf-curves.json and hf-curves.png go. work: the folder for what passes between processes; given,
    under torchrun, only this rank's part is done.
    """
    if work is not None:
        return on_rank(work)
    with tempfile.TemporaryDirectory() as room:
        save_model(Path(room) / "model")
        found = references(Path(room) / "model", Path(room))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*launch, "-m", __spec__.name, "--work", room], check=True, env=environment())
        curves = {**found, **json.loads((Path(room) / "curves.json").read_text(encoding="utf-8"))}
    report(curves, out)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def on_rank(work: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    curves = {
        f"{name}, {mesh}": entry(work / "model", work / "out", sizes)
        for name, entry in ENTRIES.items()
        for mesh, sizes in MESHES.items()
    }
    if dist.get_rank() == 0:
        (work / "curves.json").write_text(json.dumps(curves), encoding="utf-8")
    dist.destroy_process_group()


def apart(curve: Curve, reference: Curve) -> dict[str, float]:
    """Largest relative differences: of the first step, before anything was updated, and of all steps."""
    steps = [
        [abs(a / b - 1) for a, b in zip(*two, strict=True)] for two in zip(curve, reference, strict=True)
    ]
    loss, norm = zip(*steps, strict=True)
    return {"first step": max(steps[0]), "loss": max(loss), "gradient norm": max(norm)}


def report(curves: Mapping[str, Curve], out: Path) -> None:
    reference, *others = curves
    distances = {name: apart(curves[name], curves[reference]) for name in others}
    print(f"| {'entry point':35} | first step |    loss | gradient norm |\n|---|---|---|---|")
    for name, d in distances.items():
        print(f"| {name:35} | {d['first step']:10.1e} | {d['loss']:.1e} | {d['gradient norm']:13.1e} |")
    facts = {"steps": STEPS, "parts": PARTS, "rows": ROWS, "dtype": "float32", "torch": torch.__version__}
    rounded = {n: {k: float(f"{v:.2e}") for k, v in d.items()} for n, d in distances.items()}
    entries = {
        "facts": json.dumps({**facts, "reference": reference}),
        "largest_difference": block(rounded),
        "loss_and_gradient_norm": block({name: short(curve) for name, curve in curves.items()}),
    }
    text = "{\n" + ",\n".join(f'"{name}": {value}' for name, value in entries.items()) + "\n}\n"
    (out / "hf-curves.json").write_text(text, encoding="utf-8")
    plot(curves, distances, out / "hf-curves.png")


def block(values: Mapping[str, Any]) -> str:
    """One entry a line."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def short(curve: Curve) -> list[list[float]]:
    """As many digits as float32 has."""
    return [[float(f"{value:.9g}") for value in step] for step in curve]


def plot(curves: Mapping[str, Curve], distances: Mapping[str, dict[str, float]], path: Path) -> None:
    """Left the losses, one over the other; right how far each is from the reference, beside float32's eps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    reference, *others = curves
    steps = range(1, STEPS + 1)
    left.plot(steps, [loss for loss, _ in curves[reference]], linewidth=6, alpha=0.3, label=reference)
    for name in others:
        left.plot(steps, [loss for loss, _ in curves[name]], linewidth=0.8, color="black")
    left.set(xlabel="step", ylabel="loss", title=f"{len(curves)} runs")
    left.legend()
    for kind, height in (("gradient norm", 0.8), ("loss", 0.4)):
        right.barh(others, [distances[name][kind] for name in others], height=height, label=kind)
    right.axvline(torch.finfo(torch.float32).eps, color="black", linestyle="--", label="eps of float32")
    right.set(title="largest relative difference")
    right.invert_yaxis()
    right.tick_params(labelsize=7)
    right.legend(fontsize=7)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    tyro.cli(main)
