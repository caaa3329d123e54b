"""`usp bench` for real, on the CPU and a tiny model: every measurement, its JSON and its plot."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from usp.tools.bench import launch, scan
from usp.tools.bench.job import Job, Setting
from usp.tools.bench.loss import TILES
from usp.tools.bench.peers import hugging_face
from usp.tools.bench.place import Place, kernel_name
from usp.tools.bench.plots import PANELS
from usp.tools.bench.shape import shape
from usp.tools.bench.step import Model
from usp.tools.cli import main as usp
from usp.tools.rates import Rates

Run = Callable[..., CompletedProcess[str]]
TINY = ["bench", "--model", "tiny", "--gpus", "0"]


@pytest.fixture
def forked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a launch are forked from warm ones."""

    def alone(command: Sequence[str], env: Mapping[str, str], limit: float, log: Path) -> str:
        ranks = int(command[command.index("--nproc-per-node") + 1])
        result = run(*command[-3:], ranks=ranks)
        return "" if result.returncode == 0 else result.stderr[-500:]

    monkeypatch.setattr(launch, "alone", alone)


def rows_of(out: Path, what: str) -> list[dict[str, Any]]:
    (run,) = json.loads((out / f"{what}.json").read_text())["runs"]
    assert run["what"] == what
    assert run["machine"]["device"] == "CPU"
    assert "torch" in run["machine"]["versions"]
    assert (out / f"{what}.png").stat().st_size > 10_000
    rows: list[dict[str, Any]] = run["rows"]
    assert all(row["device"] == "cpu" and row["what"] == what for row in rows)
    return rows


def test_a_real_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--processes", "1", "--seq-len", "128", "--steps", "1", "--peers", "torch-cp"]
    usp([*TINY, *words, "--out", str(tmp_path)])
    rows = rows_of(tmp_path, "step")
    assert {row["contender"]: row["error"] for row in rows if "error" in row} == {
        "torch-cp": "torch context_parallel replaces attention on GPUs only (flash and cuDNN)"
    }
    ours = {row["label"]: row for row in rows if row["contender"] == "usp"}
    assert list(ours) == ["remat=attention", "memory free"]
    for row in ours.values():
        assert row["kernel"] == "cpu"
        assert row["tokens_per_s_gpu"] == pytest.approx(128 / row["seconds"])
        assert row["loss"] == pytest.approx(6.24, abs=0.2)  # the log of 512 tokens
    assert (ours["memory free"]["remat"], ours["memory free"]["foretold_host"]) == ("none", 0)
    assert "these numbers say nothing about a GPU" in capsys.readouterr().out


def test_a_peer(forked: None) -> None:
    job = Job(
        what="step", contender="transformers", model="tiny", layers=2, seq_lens=(96,), processes=1,
        device="cpu", steps=1, variants=("free", "recompute", "least"),
    )  # fmt: skip
    outcome = launch.launch(job)
    assert not outcome.failure
    rows = {row["variant"]: row for row in outcome.rows}
    assert list(rows) == ["recompute", "least", "free"]
    for variant, again in (("recompute", "every layer computed again"), ("free", "nothing computed again")):
        row = rows[variant]
        assert (row["kernel"], row["again"], row["loss_by"]) == ("cpu", again, "tiles")
        assert row["loss"] == pytest.approx(6.24, abs=0.2)
    assert "nothing but recomputation to save memory with" in rows["least"]["error"]


def test_windows(forked: None, windowed_dir: Path, tmp_path: Path) -> None:
    """Of more layers than the model has, by ours and a peer; longer rows than the window and shorter ones."""
    words = [*TINY[:1], "--model", str(windowed_dir), "--gpus", "0", "--processes", "1", "--layers", "5"]
    words += ["--seq-len", "64", "128", "--steps", "1", "--out", str(tmp_path)]
    usp([*words, "--setting", "remat=full", "--variants", "recompute", "--peers", "transformers"])
    rows = rows_of(tmp_path, "step")
    assert [row["contender"] for row in rows] == ["usp"] * 4 + ["transformers"] * 2
    for row in rows:
        assert (row.get("error"), row["layers"], row["kernel"]) == (None, 5, "tiled")
        keys = {64: 32.0, 128: (4 * 100 * (1 - 100 / 256) + 64) / 5}[row["seq_len"]]
        entries = 5 * (64 * 16 * 12 + 3 * 64 * 128) + 512 * 64
        flops = 6 * entries + 12 * 5 * 4 * 16 * keys
        assert row["tflops_gpu"] == pytest.approx(flops * row["tokens_per_s_gpu"] / 1e12)
    for what, more in (("memory", ["--setting", "remat=attention"]), ("scan", [])):
        usp([*words, "--what", what, *more])
        assert not any("error" in row for row in rows_of(tmp_path, what))


def test_memory_with_a_window(forked: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As much is remembered, by the plan; a token costs what the window leaves."""
    rows = []
    for window in ([], ["--window", "32"]):
        words = ["--what", "memory", "--processes", "1", "--seq-len", "128", "--steps", "1", *window]
        usp([*TINY, *words, "--setting", "remat=attention", "--out", str(tmp_path)])
        (row,) = json.loads((tmp_path / "memory.json").read_text())["runs"][-1]["rows"]
        rows.append(row)
    free, bound = rows
    assert ("window" in free, bound["window"], bound["kernel"]) == (False, 32, "tiled")
    assert [bound[name] for name in ("foretold", "foretold_host")] == [
        free["foretold"],
        free["foretold_host"],
    ]
    spent = [row["tflops_gpu"] / row["tokens_per_s_gpu"] * 1e12 for row in rows]
    keys = 32 * (1 - 32 / 256)
    assert spent[0] - spent[1] == pytest.approx(12 * 2 * 4 * 16 * (64 - keys))
    assert "window" in capsys.readouterr().out
    usp(["bench", "--plot", str(tmp_path / "memory.json"), "--what", "memory", "--out", str(tmp_path)])
    assert capsys.readouterr().out.count("remat=attention ") == 2  # neither takes the other's place


def test_scan_and_loop_have_the_windows(windowed_dir: Path, tmp_path: Path) -> None:
    place, cfg = Place(0, 1, 1, torch.device("cpu"), tmp_path), shape(str(windowed_dir), 3)
    job = Job(
        what="scan", contender="usp", model="", layers=3, seq_lens=(230,), processes=1, device="cpu",
        kernel="tiled",
    )  # fmt: skip
    sums = []
    for windows in (cfg.windows, ()):
        model = Model(replace(cfg, windows=windows), Setting(label="", table="ulysses"), place)
        torch.manual_seed(0)
        sums += [float(step()) for step in scan.both(model, job, 230, "none")]
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)
    assert sums[2] == pytest.approx(sums[3], rel=1e-5)
    assert abs(sums[0] - sums[2]) > 1


def test_a_peers_attention_has_the_windows(windowed_dir: Path, tmp_path: Path) -> None:
    """Built as it is measured, against Transformers' own masks."""
    from transformers import AutoModelForCausalLM

    cfg, place = shape(str(windowed_dir), 3), Place(0, 1, 1, torch.device("cpu"), tmp_path)
    hugging_face.register(cfg, hugging_face.by_kernel(kernel_name("auto", cfg, place), torch.float32))
    model = hugging_face.build(cfg, place, torch.float32)
    auto: Any = AutoModelForCausalLM
    eager = auto.from_config(copy.deepcopy(model.config), attn_implementation="eager")  # which it writes to
    eager.load_state_dict(model.state_dict())
    ids, _, positions = hugging_face.tokens(cfg, 230, place.device)
    got, want = (m.model(input_ids=ids, position_ids=positions).last_hidden_state for m in (model, eager))
    # float32 through three layers, the softmax and its sums taken in another order
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    model.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(ValueError, match=r"sliding_window=None must be that of the layer, got 100"):
        model.model(input_ids=ids, position_ids=positions)


@pytest.mark.parametrize(
    ("what", "words", "labels"),
    [
        ("kernel", [], ["causal", "packed"] * 2),
        ("loss", [], ["floor: three products", f"usp, tiles of {TILES[0]}", "torch"]),  # the row is shorter
        ("passes", [], [
            "norm", "norm, backward", "rotation, order of the wire", "rotation, order of the wire, backward",
            "activation", "activation, backward", "loss, a tile of 64", "AdamW with clipping",
        ]),
        ("scan", ["--processes", "1"], ["remat=none", "remat=full"]),
        ("exchange", ["--batch-size", "1", "2", "--peers", "none"], [
            "batch 1", "batch 1, in the model", "batch 2", "batch 2, in the model",
        ]),
        ("memory", ["--processes", "1", "--steps", "1"], [
            "none", "+ tiles", "+ full remat", "+ attention kept", "+ offload", "+ head chunks", "+ groups",
            "+ groups, head chunks",
        ]),
    ],
)  # fmt: skip
def test_every_measurement(
    forked: None, tmp_path: Path, what: str, words: list[str], labels: list[str]
) -> None:
    usp([*TINY, "--what", what, "--seq-len", "64", *words, "--out", str(tmp_path)])
    rows = rows_of(tmp_path, what)
    assert [row["label"] for row in rows] == labels
    assert not any("error" in row for row in rows)
    drawn = [all(panel.y(row) is not None for row in rows) for panel in PANELS[what]]
    assert any(drawn), "no panel shows all rows"


def test_parts_of_the_scaling(forked: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("1", "2"):
        words = ["--what", "scaling", "--seq-len", "32", "128", "--steps", "1", "--part", part]
        usp([*TINY, *words, "--out", str(tmp_path)])
    runs = json.loads((tmp_path / "scaling.json").read_text())["runs"]
    assert [[row["label"] for row in run["rows"]] for run in runs] == [
        ["ulysses 1", "ulysses 1, 4 head chunks"],
        ["ulysses 2", "ulysses 2, 2 head chunks", "ulysses 1 x ring 2", "odysseus 2"],
    ]
    assert not any("error" in row for run in runs for row in run["rows"])
    words = ["--what", "scaling", "--layers", "1", "--seq-len", "32", "128", "--part", "4"]
    usp([*TINY, *words, "--out", str(tmp_path / "whole")])
    (row,) = json.loads((tmp_path / "whole" / "scaling.json").read_text())["runs"][0]["rows"]
    assert (row["label"], row["layers"], row["seq_len"], row["world"]) == ("ulysses 1, 2 layers", 2, 32, 1)
    assert (row["moments"], row.get("error")) == ("host", None)
    assert "UPipe            1048576 tokens on 8 H100: 473 tokens/s and 411" in capsys.readouterr().out


def test_calibrate(forked: None, tmp_path: Path) -> None:
    usp([*TINY, "--calibrate", "--out", str(tmp_path / "rates.json")])
    rates = Rates.read(tmp_path / "rates.json")
    assert (rates.device, rates.processes, rates.kernel) == ("CPU", 2, "cpu")
    assert min(v for v in rates.__dict__.values() if isinstance(v, float)) > 0
    assert rates.all_to_all is not None


def test_passes_that_depend_on_no_length_are_measured_once(forked: None, tmp_path: Path) -> None:
    usp([*TINY, "--what", "passes", "--seq-len", "32", "64", "--out", str(tmp_path)])
    labels = [row["label"] for row in rows_of(tmp_path, "passes")]
    assert labels.count("norm") == labels.count("activation, backward") == 2
    assert labels.count("AdamW with clipping") == labels.count("loss, a tile of 64") == 1
