"""Faults: killed, stuck, told to end, out of room, not finite. Each ends in time and says why."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

import usp.state.save as saving
import usp.tools.loop as loop
from tests.tools.conftest import environment
from tests.tools.test_resume import assert_same, curve, words
from tests.tools.warm import Job, said_by, start_warm
from usp.state.files import read_index
from usp.tools.cli import main as usp
from usp.tools.facts import same_everywhere
from usp.tools.metrics import read_rows
from usp.tools.ranks import Ranks

Run = Callable[..., CompletedProcess[str]]

FAULTY = '''
"""python -m faulty KIND,KIND,... OPTIONS: training with a fault on rank 1, another one after each restart."""
import os, resource, signal, sys, threading, time
import usp.state.save as saving
from usp.tools import loop, train

kinds, *options = sys.argv[1:]
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
kind = [*kinds.split(","), *["none"] * 9][attempt]
second = os.environ.get("RANK", "0") == "1"
rate, write = loop.learning_rate, saving.write_pieces

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def learning_rate(cfg, step):
    if kind == "slow":
        time.sleep(0.2)
    if second and step == 5:
        if kind == "step":
            die()
        if kind == "collective":  # the other rank is waiting in it by then
            threading.Timer(0.7, die).start()
            time.sleep(60)
        if kind == "raise":
            raise RuntimeError("something of its own")
        if kind == "hang":
            time.sleep(1000)
        if kind == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))
    return rate(cfg, step)

def write_pieces(folder, file, pieces):
    if second and kind == "save" and folder.name == ".step-00000006.tmp":
        (folder / file).write_bytes(b"half")
        die()
    return write(folder, file, pieces)

loop.learning_rate, saving.write_pieces = learning_rate, write_pieces
if second and kind in ("--seq-len", "--model", "--data"):
    options[options.index(kind) + 1] = {"--seq-len": "17"}.get(kind, "other" + kind)
train.main(options)
'''


@pytest.fixture
def faulty(run: Run, model_dir: Path, corpus: Path, tmp_path: Path) -> Callable[..., CompletedProcess[str]]:
    """faulty("kind", ...): training on two ranks to OUT, with a restart after each fault but the last."""
    (tmp_path / "faulty.py").write_text(FAULTY)

    def go(*kinds: str, restarts: int, **options: Any) -> CompletedProcess[str]:
        line = words(model_dir, corpus, tmp_path / "out", ulysses=2, timeout=12, **options)
        return run("faulty", ",".join(kinds), *line, ranks=2, restarts=restarts)

    return go


def test_killed_three_times_and_done(
    run: Run, faulty: Callable[..., CompletedProcess[str]], model_dir: Path, corpus: Path, tmp_path: Path
) -> None:
    """In a step, in a collective and in a save; torchrun's restarts go on to the bit from what was saved."""
    want = run("usp.tools.train", *words(model_dir, corpus, tmp_path / "want", ulysses=2), ranks=2)
    assert want.returncode == 0, want.stderr
    began = time.monotonic()
    result = faulty("step", "collective", "save", restarts=3)
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - began < 200
    said = re.findall(
        r"error on rank 0: (.*): lost contact after .*: rank 1 is not heard from", result.stderr
    )
    assert said[:2] == ["step 5", "step 5"]
    assert len(said) == 3
    assert result.stdout.count("going on from") == 3
    assert result.stdout.count("step-00000003") == 3  # the save of step 6 was killed
    assert_same(tmp_path / "out", tmp_path / "want")
    assert sorted(p.name for p in (tmp_path / "out" / "state").iterdir()) == [
        "step-00000009",
        "step-00000010",
    ]


def test_out_of_room_an_error_of_its_own_and_stuck(
    faulty: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    began = time.monotonic()
    result = faulty("full", "raise", "hang", restarts=2)
    seconds = time.monotonic() - began
    assert result.returncode == 1
    assert "error on rank 1: step=6 must be saved to" in result.stderr
    assert "File too large" in result.stderr
    assert "error on rank 1: step 5: RuntimeError: something of its own" in result.stderr
    assert re.search(r"rank 0: step 5: lost contact .* rank 1 ended: step 5: RuntimeError", result.stderr)
    assert re.search(r"rank 0: step 5: lost contact .* rank 1 still runs, at step 5", result.stderr)
    assert "error on rank 1: step 5 must take at most 24 s (twice --timeout)" in result.stderr
    assert "in learning_rate" in result.stderr  # where it was stuck
    assert seconds < 180
    assert [p.name for p in (tmp_path / "out" / "state").iterdir()] == ["step-00000003"]
    assert not (tmp_path / "out" / "hf").exists()


def test_ranks_that_were_started_differently(
    faulty: Callable[..., CompletedProcess[str]], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    make_model(tmp_path / "other--model", num_heads=2)
    (tmp_path / "other--data").write_text("another text")
    result = faulty("--seq-len", "--model", "--data", restarts=2)
    assert result.returncode == 1
    assert "error: seq_len=39 must be the same on every rank, got 17 on rank 1." in result.stderr
    for name in ("model", "data"):
        assert re.search(
            rf"error: {name}=\w+ must be the same on every rank, got \w+ on rank 1\.", result.stderr
        )
    assert not (tmp_path / "out").exists()


def test_the_launcher_is_told_to_end(model_dir: Path, corpus: Path, tmp_path: Path, run: Run) -> None:
    """SIGTERM to torchrun, which passes it on: all ranks save the same step, and a resume goes on from it."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    out = tmp_path / "out"
    line = words(model_dir, corpus, out, ulysses=2, steps=200, save_every=100)
    said = tmp_path / "said"
    said.mkdir()
    job = Job(["faulty", "slow", *line], 2, 0, None, tmp_path, environment(), said)
    process = start_warm(job)
    end = time.monotonic() + 120
    while len(read_rows(out / "metrics.jsonl")) < 3 and time.monotonic() < end:
        time.sleep(0.1)
    process.terminate()
    process.join(60)
    assert process.exitcode
    step = int(re.findall(r"ended by SIGTERM after step (\d+); --resume goes on", said_by(job)[0])[0])
    assert [p.name for p in (out / "state").iterdir()] == [f"step-{step:08d}"]
    assert [row[0] for row in curve(out)] == list(range(1, step + 1))
    files = read_index(out / "state" / f"step-{step:08d}").tensors["params.embed"].shards
    assert len(files) == 2


def test_sigterm_ends_with_143_and_a_checkpoint(
    model_dir: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = loop.learning_rate

    def learning_rate(cfg: Any, step: int) -> float:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return rate(cfg, step)

    monkeypatch.setattr(loop, "learning_rate", learning_rate)
    line = [w for w in words(model_dir, corpus, tmp_path / "out") if w not in ("--save-every", "3")]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        usp(["train", *line])
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert [p.name for p in (tmp_path / "out" / "state").iterdir()] == ["step-00000003"]
    assert not (tmp_path / "out" / "hf").exists()


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """In these steps one gradient of the second layer is infinite."""
    real, count = loop.reduce_grads, iter(range(1, 1000))

    def reduce_grads(grads: Any, *args: Any) -> Any:
        grads = real(grads, *args)
        if next(count) in steps:
            grads.layers[1].w_up[0, 0] = torch.inf
        return grads

    monkeypatch.setattr(loop, "reduce_grads", reduce_grads)


def test_a_gradient_that_is_not_finite_stops(
    model_dir: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The message names the step and the tensor; what was saved before is good, also with rare reports, and
    when it is still being written."""
    write = saving.write_pieces

    def slow(*args: Any) -> Any:
        time.sleep(1.0)
        return write(*args)

    monkeypatch.setattr(saving, "write_pieces", slow)
    poison(monkeypatch, {5})
    with pytest.raises(SystemExit) as ended:
        usp(["train", *words(model_dir, corpus, tmp_path / "out", log_every=100)])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "must be finite, got this at step=5, first in the gradient of layers.1.w_up on rank 0." in said
    assert [p.name for p in (tmp_path / "out" / "state").iterdir()] == ["step-00000003"]
    assert [row[0] for row in curve(tmp_path / "out")] == [1, 2, 3, 4]


def test_a_gradient_that_is_not_finite_is_left_out(
    model_dir: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {5})
    usp(["train", *words(model_dir, corpus, tmp_path / "out", on_nan="skip")])
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
    assert [row["step"] for row in rows if row["grad_norm"] is None] == [5]
    assert all(row["loss"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert read_index(tmp_path / "out" / "state" / "step-00000010").meta["updates"] == 9


def test_all_that_is_left_out_ends_too(
    model_dir: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    poison(monkeypatch, set(range(4, 100)))
    with pytest.raises(SystemExit) as ended:
        usp(["train", *words(model_dir, corpus, tmp_path / "out", on_nan="skip", steps=40)])
    assert ended.value.code == 1
    assert "loss=nan must not come 20 steps in a row" in capsys.readouterr().err


def test_the_rank_that_differs_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many ranks it is the few that differ, of two the second."""
    ranks = Ranks(rank=0, world=1, device=torch.device("cpu"))
    cases = [
        ([1, 1, 2, 1, 3], "a=1 must be the same on every rank, got 2 on rank 2, 3 on rank 4."),
        ([1, 2], "a=1 must be the same on every rank, got 2 on rank 1."),
    ]
    for values, message in cases:
        everyone = [{"a": value} for value in values]
        monkeypatch.setattr(Ranks, "exchange", lambda self, value, everyone=everyone: everyone)
        with pytest.raises(SystemExit):
            same_everywhere(ranks, everyone[0])
        assert message in capsys.readouterr().err
