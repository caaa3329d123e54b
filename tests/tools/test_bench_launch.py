"""`usp bench`: launches of every bad kind, and what becomes of their rows."""

import json
import os
import shlex
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tools.bench_worker import OUT_OF_MEMORY
from usp.tools.bench import launch, plots
from usp.tools.bench.job import Job
from usp.tools.bench.report import Run, joined, load
from usp.tools.cli import main as usp

JSON = ("what", "command", "started", "machine", "rows")


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run the stand-in, without torchrun, on two GPUs; every peer counts as installed."""
    monkeypatch.setattr(launch, "WORKER", "tests.tools.bench_worker")
    alone = launch.alone
    monkeypatch.setattr(launch, "alone", lambda command, *rest: alone([command[0], *command[-4:]], *rest))
    monkeypatch.setattr(launch, "GRACE", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)


def test_one_bad_contender_leaves_the_others(made_up: None, tmp_path: Path) -> None:
    words = ["bench", "--seq-len", "64", "128", "--gpus", "1", "--limit", "2", "--out", str(tmp_path)]
    usp([*words, "--peers", "deepspeed", "transformers"])
    runs = json.loads((tmp_path / "step.json").read_text())
    assert runs["format"] == 1
    (run,) = runs["runs"]
    assert tuple(run) == JSON
    assert shlex.split(run["command"]) == ["usp", *words, "--peers", "deepspeed", "transformers"]
    rows = {(r["contender"], r["label"], r["seq_len"]): r for r in run["rows"]}
    ours = [row for row in run["rows"] if row["contender"] == "usp"]
    assert len(ours) == 4
    assert not any("error" in row for row in ours)
    # 64 tokens in 0.8 s against 64 in 0.5 s; a share of the data sheet's 989 TFLOP/s
    assert rows["deepspeed", "recompute", 64]["ours_over"] == pytest.approx(1.6)
    assert rows["deepspeed", "recompute", 64]["peak_share"] == pytest.approx(100 / 989)
    lost = [rows["deepspeed", label, n] for label, n in (("recompute", 128), ("free", 64), ("free", 128))]
    assert all(row["error"] == f"{OUT_OF_MEMORY} (exit code 1)" for row in lost)
    late = [row for key, row in rows.items() if key[0] == "transformers"]
    assert [row["error"] for row in late] == ["took longer than 2 s"] * 4
    assert (tmp_path / "step.png").stat().st_size > 10_000
    assert OUT_OF_MEMORY in (tmp_path / "step-deepspeed.log").read_text()


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end(
    told: signal.Signals,
    made_up: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """What was started ends too, and what was measured is kept."""
    children, start, pid = [], launch.start, os.getpid()

    def started(*args: Any) -> Any:
        children.append(start(*args))
        return children[-1]

    def tell() -> None:
        rows = tmp_path / "step-transformers.jsonl"
        while not rows.exists() or not rows.stat().st_size:
            time.sleep(0.05)
        os.kill(pid, told)

    monkeypatch.setattr(launch, "start", started)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    threading.Thread(target=tell, daemon=True).start()
    words = ["bench", "--seq-len", "64", "--gpus", "1", "--limit", "50", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        usp([*words, "--peers", "transformers"])
    assert ended.value.code == 130
    assert [child.poll() is None for child in children] == [False, False]
    (run,) = json.loads((tmp_path / "step.json").read_text())["runs"]
    errors = [row.get("error") for row in run["rows"]]
    assert errors == [None, None, "interrupted", "interrupted"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_every_contender_has_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU one process computes on all of them, two on half of them each; what is set stays."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)

    def of(processes: int, device: str) -> str:
        job = Job(
            what="step", contender="usp", model="tiny", layers=2, seq_lens=(64,), processes=processes,
            device=device,
        )  # fmt: skip
        return launch.environment(launch.threads(job))["OMP_NUM_THREADS"]

    assert [of(processes, "cpu") for processes in (1, 2, 4, 8)] == ["6", "3", "1", "1"]
    assert of(1, "cuda") == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert of(1, "cpu") == "5"


def test_runs_are_added_and_drawn_again(
    made_up: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for length in ("64", "96"):
        usp(["bench", "--seq-len", length, "--peers", "none", "--out", str(tmp_path)])
    assert [row["seq_len"] for row in joined(load(tmp_path / "step.json"))] == [64, 64, 96, 96]
    capsys.readouterr()
    usp(["bench", "--plot", str(tmp_path / "step.json"), "--out", str(tmp_path / "again")])
    assert capsys.readouterr().out.count("made up") == 4
    assert (tmp_path / "again" / "step.png").is_file()
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    usp(["bench", "--plot", str(tmp_path / "step.json"), "--out", str(tmp_path / "none")])
    assert "no plot: matplotlib is not installed" in capsys.readouterr().out
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(SystemExit, match=r"other\.json must be JSON written by usp bench"):
        usp(["bench", "--plot", str(tmp_path / "other.json")])


def test_shares_are_of_what_is_left_of_a_run() -> None:
    def row(contender: str, seq_len: int, speed: float, **more: Any) -> dict[str, Any]:
        facts = {"what": "step", "label": contender, "variant": "free", "world": 1}
        return {**facts, "contender": contender, "seq_len": seq_len, "tokens_per_s_gpu": speed, **more}

    old = Run("step", "a", "1", {}, [row("usp", 64, 10.0), row("peer", 64, 8.0, ours_over=1.25)])
    new = Run("step", "b", "2", {}, [row("usp", 64, 12.0), row("usp", 96, 9.0), row("peer", 96, 6.0)])
    found = {(r["contender"], r["seq_len"]): r for r in joined([old, new])}
    assert found["usp", 64]["tokens_per_s_gpu"] == 12.0
    assert "ours_over" not in found["peer", 64]  # ours of that run was measured again in another
    assert found["peer", 96]["ours_over"] == 1.5
