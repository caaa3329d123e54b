"""Runs that stop and go on: to the bit on one mesh, to rounding on any other, no row twice or left out."""

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from usp.tools import loop, text
from usp.tools.cli import main as usp
from usp.tools.metrics import read_rows

Run = Callable[..., CompletedProcess[str]]
STEPS = 10  # of 2 rows; an epoch has 15, so that step 8 spans two epochs
BASE = {"seq_len": 39, "batch_size": 2, "lr": 3e-3, "warmup": 5, "weight_decay": 0.1, "save_every": 3}


def words(model: Path, data: Path, out: Path, *more: str, **changed: Any) -> list[str]:
    options = {"model": model, "data": data, "out": out, "steps": STEPS, **BASE, **changed}
    return [*(w for name, v in options.items() for w in (f"--{name.replace('_', '-')}", str(v))), *more]


def curve(out: Path) -> list[tuple[Any, ...]]:
    rows = read_rows(out / "metrics.jsonl")
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows]


def saved(out: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, file by file."""
    files = sorted((out / "state" / f"step-{step:08d}").glob("*.safetensors"))
    assert files
    return {f"{f.name} {name}": value for f in files for name, value in load_file(f).items()}


def assert_same(out: Path, other: Path) -> None:
    got, want = saved(out), saved(other)
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
    assert_same_result(out, other)


def assert_same_result(out: Path, other: Path) -> None:
    assert curve(out) == curve(other)
    exports = [load_file(path / "hf" / "model.safetensors") for path in (out, other)]
    assert all(torch.equal(exports[0][name], exports[1][name]) for name in exports[1])


@pytest.fixture(scope="module", autouse=True)
def drawing() -> Iterator[None]:
    """Each step of a run in this process draws a random number, so that a state that is not kept shows."""
    rate = loop.learning_rate

    def learning_rate(cfg: Any, step: int) -> float:
        torch.rand(1)
        return rate(cfg, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "learning_rate", learning_rate)
        yield


@pytest.fixture(scope="module")
def through(drawing: None, model_dir: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without interruption on one process."""
    out = tmp_path_factory.mktemp("through") / "out"
    usp(["train", *words(model_dir, corpus, out)])
    return out


def test_in_the_warm_up_and_in_an_epoch(
    through: Path, model_dir: Path, corpus: Path, tmp_path: Path
) -> None:  # case H60, H61, D40
    """Stopped twice: everything is that of the run without interruption, random state included."""
    for steps, moments in ((3, "device"), (7, "host"), (STEPS, "host")):
        usp(["train", *words(model_dir, corpus, tmp_path, "--resume", steps=steps, moments=moments)])
        assert curve(tmp_path) == curve(through)[:steps]
    assert_same(tmp_path, through)
    assert [row[3] for row in curve(tmp_path)[:5]] == pytest.approx([6e-4, 1.2e-3, 1.8e-3, 2.4e-3, 3e-3])
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["step-00000009", "step-00000010"]


def test_on_ranks_and_on_other_meshes(
    run: Run, through: Path, model_dir: Path, corpus: Path, tmp_path: Path
) -> None:  # case D56, D57
    """Two ranks stop and go on: to the bit. What they saved is gone on from on other meshes."""

    def go(out: str, ranks: int, *mesh: str, steps: int = STEPS) -> Path:
        more = [*mesh, "--resume"]
        result = run(
            "usp.tools.train", *words(model_dir, corpus, tmp_path / out, *more, steps=steps), ranks=ranks
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return tmp_path / out

    ulysses = ("--ulysses", "2")
    uncut, parts = go("uncut", 2, *ulysses), go("parts", 2, *ulysses, steps=4)
    others: dict[str, tuple[int, list[str]]] = {
        "ring": (2, ["--ring", "2", "--table", "ring"]),
        "four": (4, ["--dp", "2", "--ring", "2", "--table", "usp"]),
    }
    for name in (*others, "one"):
        shutil.copytree(parts, tmp_path / name)
    assert_same(go("parts", 2, *ulysses), uncut)
    for name, (ranks, mesh) in others.items():
        go(name, ranks, *mesh)
    usp(["train", *words(model_dir, corpus, tmp_path / "one", "--resume")])
    for name in (*others, "parts", "one"):
        got, want = curve(tmp_path / name), curve(through)
        assert [row[0] for row in got] == [row[0] for row in want]
        for column in (1, 2):  # loss and norm: float32 sums in another order, over 10 updates
            numbers = [row[column] for row in want]
            assert [row[column] for row in got] == pytest.approx(numbers, rel=5e-5), name


def test_every_position_in_the_data() -> None:
    """Batches from any step on are those that a run from the first step comes to."""
    docs = [np.arange(n, dtype=np.int32) + 100 * n for n in (5, 11, 2, 30, 17)]
    data = text.Packed(docs=docs, seq_len=7, seed=3)
    want = list(islice(data.batches(3), 25))  # 10 rows an epoch: 25 steps are seven and a half
    for start in range(25):
        got = next(data.batches(3, start=start))
        for one, other in ((got.tokens, want[start].tokens), (got.valid, want[start].valid)):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other), start


def test_lines_of_metrics_are_not_doubled(
    through: Path, model_dir: Path, corpus: Path, tmp_path: Path
) -> None:
    """A killed run had gone further than its last checkpoint, and was writing a line."""
    out = tmp_path / "out"
    shutil.copytree(through, out)
    shutil.rmtree(out / "state" / "step-00000010")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss": 4.')
    usp(["train", *words(model_dir, corpus, out, "--resume")])
    assert curve(out) == curve(through)
    assert_same(out, through)


def test_a_run_that_is_done_and_more_steps(
    through: Path, model_dir: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(through, out)
    usp(["train", *words(model_dir, corpus, out, "--resume")])
    assert "holds step 10 and its export: nothing is left to do" in capsys.readouterr().out
    assert curve(out) == curve(through)
    usp(["train", *words(model_dir, corpus, out, "--resume", steps=12)])
    assert [row[0] for row in curve(out)] == list(range(1, 13))
    before, after = (load_file(path / "hf" / "model.safetensors") for path in (through, out))
    assert any(not torch.equal(before[name], after[name]) for name in after)


def test_the_last_checkpoint_is_damaged(
    through: Path, model_dir: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so, goes on from the one before, and comes to the same end."""
    out = tmp_path / "out"
    shutil.copytree(through, out)
    file = out / "state" / "step-00000010" / "rank-00000.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    usp(["train", *words(model_dir, corpus, out, "--resume")])
    said = capsys.readouterr().err
    assert "warning: the checkpoint of step 10 is damaged: " in said
    assert "It is set aside as damaged-step-00000010; going on from step 9." in said
    assert_same(out, through)


CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"seq_len": 40}, "seq_len=40 must be that of the run that is resumed, got seq_len=39 in out="),
    ({"lr": 1e-3, "seed": 4}, "got lr=0.003, seed=0 in out="),
    ({"batch_size": 4}, "batch_size=4 must be that of the run that is resumed, got batch_size=2 in out="),
    ({"dtype": "bfloat16"}, "dtype=bfloat16 must be"),
]


def refusal(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        usp(["train", *line])
    assert ended.value.code == 1
    return capsys.readouterr().err


def test_another_run_is_refused(
    through: Path, model_dir: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    make_model: Callable[..., Path],
) -> None:  # fmt: skip
    for changed, message in CHANGED:
        assert message in refusal(capsys, *words(model_dir, corpus, through, "--resume", **changed))
    (tmp_path / "other.txt").write_text("something else")
    assert "data=" in refusal(capsys, *words(model_dir, tmp_path / "other.txt", through, "--resume"))
    other = make_model(tmp_path / "model", num_heads=2)
    assert "model=" in refusal(capsys, *words(other, corpus, through, "--resume"))
    assert "add --resume" in refusal(capsys, *words(model_dir, corpus, through))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    said = refusal(capsys, *words(model_dir, corpus, tmp_path / "full", "--resume"))
    assert "must hold a run to resume it, got content without config.json" in said
    (tmp_path / "full" / "config.json").write_text("[]")
    said = refusal(capsys, *words(model_dir, corpus, tmp_path / "full", "--resume"))
    assert "got an unreadable config.json" in said
    assert len(curve(through)) == STEPS  # none of them has touched it


def test_options_are_in_the_folder(through: Path) -> None:
    config = json.loads((through / "config.json").read_text())
    assert config["seq_len"] == 39
    assert config["facts"]["batch_size"] == 2
    assert json.loads((through / "state" / "step-00000009" / "index.json").read_text())["meta"]["rows"] == 18
