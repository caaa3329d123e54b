"""Whole runs through torchrun: the same losses on one and two ranks, files written, an export that loads."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from usp.tools import loop
from usp.tools.cli import main as usp

Run = Callable[..., CompletedProcess[str]]
MESHES: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "ulysses": (2, ["--ulysses", "2"]),
    "dp": (2, ["--dp", "2", "--remat", "attention", "--stored", "1"]),
}
STEPS = 5


def read_rows(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def options(model: Path, data: Path, out: Path) -> list[str]:
    words = [
        "--model",
        str(model),
        "--data",
        str(data),
        "--out",
        str(out),
        "--seq-len",
        "39",
        "--batch-size",
        "2",
    ]
    return [*words, "--steps", str(STEPS), "--lr", "3e-3", "--warmup", "2", "--weight-decay", "0.1"]


def test_every_mesh_trains_alike(run: Run, model_dir: Path, corpus: Path, tmp_path: Path) -> None:
    """Loss and gradient norm of every step, to float32 rounding. # case H5, H6, H10, D8, D10, D17"""
    curves = {}
    for name, (ranks, mesh) in MESHES.items():
        out, logs = tmp_path / name, tmp_path / f"{name}-logs"
        result = run("usp.tools.train", *options(model_dir, corpus, out), *mesh, ranks=ranks, logs=logs)
        assert result.returncode == 0, result.stdout + result.stderr + every_log(logs)
        curves[name] = read_rows(out)
        for row in curves[name]:  # 6 of 2 layers' and the head's entries; 12 of 2 x 4 heads of 6, 39 / 2 keys
            work = 6 * (2 * (24 * 6 * 12 + 3 * 24 * 40) + 300 * 24) + 12 * 2 * 4 * 6 * 39 / 2
            assert row["tflops"] == pytest.approx(work * row["tokens_per_s"] / ranks / 1e12)
            assert "mfu" not in row
        assert_files(out)
        if ranks > 1:
            only_rank_0_speaks(logs)
    want = curves.pop("one")
    assert [row["step"] for row in want] == list(range(1, STEPS + 1))
    assert [row["lr"] for row in want] == pytest.approx([1.5e-3, 3e-3, 3e-3, 3e-3, 3e-3])
    assert want[-1]["loss"] < want[0]["loss"]
    for name, rows in curves.items():
        for key in ("loss", "grad_norm"):  # float32 sums in another order, over 5 updates
            assert [r[key] for r in rows] == pytest.approx([r[key] for r in want], rel=2e-5), (name, key)
    loads_in_transformers(tmp_path / "ulysses" / "hf", tmp_path / "one" / "hf")


def every_log(logs: Path) -> str:
    return "\n".join(p.read_text() for p in logs.rglob("*.log"))


def assert_files(out: Path) -> None:
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tensorboard").glob("events.*"))
    assert json.loads((out / "config.json").read_text())["seq_len"] == 39


def only_rank_0_speaks(logs: Path) -> None:
    said = {rank: "".join(p.read_text() for p in logs.glob(f"*/attempt_0/{rank}/*.log")) for rank in (0, 1)}
    assert f"{STEPS}/{STEPS}" in said[0]
    assert "rows a step" in said[0]
    assert "saved" in said[0]
    assert said[1] == ""


def loads_in_transformers(folder: Path, other: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models: list[Any] = [AutoModelForCausalLM.from_pretrained(path) for path in (folder, other)]
    ids = AutoTokenizer.from_pretrained(folder)("heads are exchanged", return_tensors="pt").input_ids
    logits = [model(ids).logits for model in models]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_second_epoch_goes_on(model_dir: Path, tmp_path: Path) -> None:  # case H60
    """One row an epoch, shorter than the row: five steps are five epochs."""
    (tmp_path / "a.txt").write_text("one short text")
    usp(["train", *options(model_dir, tmp_path / "a.txt", tmp_path / "out"), "--log-every", "2"])
    rows = read_rows(tmp_path / "out")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["loss"] > 0 and row["grad_norm"] > 0 for row in rows)


def test_a_save_is_no_steps_time(
    model_dir: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which every save takes an hour, as no step does on a busy machine."""
    save, clock, hours = loop.save, time.perf_counter, []

    def slow(*args: Any) -> None:
        hours.append(3600.0)
        save(*args)

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(hours))

    monkeypatch.setattr(loop, "save", slow)
    usp(["train", *options(model_dir, corpus, tmp_path / "out"), "--save-every", "2"])
    rows = read_rows(tmp_path / "out")
    assert len(rows) == STEPS
    assert len(hours) == 3
    assert max(row["seconds"] for row in rows) < 3600


def test_loss_that_is_not_finite_ends_all_ranks(
    run: Run, model_dir: Path, corpus: Path, tmp_path: Path
) -> None:
    """One message, no export, and the plot up to there."""
    out = tmp_path / "out"
    words = [*options(model_dir, corpus, out), "--ulysses", "2", "--lr", "1e30"]
    result = run("usp.tools.train", *words, ranks=2)
    assert result.returncode == 1
    assert (
        len(re.findall(r"(?<!traceback : )error\b.* must be finite, got this at step=", result.stderr)) == 1
    )
    assert (out / "loss.png").exists()
    assert not (out / "hf").exists()


def test_bfloat16_keeps_float32_weights(model_dir: Path, corpus: Path, tmp_path: Path) -> None:
    """In bfloat16 the losses follow those of float32: updates smaller than its steps are not lost."""
    curves = {}
    for dtype in ("float32", "bfloat16"):
        usp(["train", *options(model_dir, corpus, tmp_path / dtype), "--dtype", dtype])
        curves[dtype] = [row["loss"] for row in read_rows(tmp_path / dtype)]
    assert curves["bfloat16"] == pytest.approx(curves["float32"], rel=1e-2)
    saved = load_file(tmp_path / "bfloat16" / "hf" / "model.safetensors")
    assert {t.dtype for t in saved.values()} == {torch.bfloat16}


def test_convert_there_and_back_is_exact(model_dir: Path, tmp_path: Path) -> None:
    native, back = tmp_path / "native", tmp_path / "hf"
    usp(["convert", str(model_dir), str(native), "--to", "usp"])
    usp(["convert", str(native), str(back), "--to", "hf", "--max-shard-size", "10KB"])
    want = load_file(model_dir / "model.safetensors")
    files = sorted(back.glob("*.safetensors"))
    got = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 1
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    loads_in_transformers(back, model_dir)


def test_convert_changes_dtype(model_dir: Path, tmp_path: Path) -> None:
    usp(["convert", str(model_dir), str(tmp_path / "hf"), "--to", "hf", "--dtype", "bfloat16"])
    got = load_file(tmp_path / "hf" / "model.safetensors")
    assert {t.dtype for t in got.values()} == {torch.bfloat16}
