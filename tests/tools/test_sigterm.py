"""SIGTERM in every phase of a run: it ends in time with its exit code, whole files and the last step."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import usp.state.save as saving
from tests.tools.test_resume import assert_same_result, curve, words
from usp.tools import loop, train
from usp.tools.cli import main as usp
from usp.tools.stop import EXIT_CODE

Run = Callable[..., CompletedProcess[str]]

PHASES = '''
"""python -m phases KIND OPTIONS: training that is told to end somewhere, from inside."""
import os, signal, sys, time
from usp.models.files import convert
from usp.tools import text, train

kind, *options = sys.argv[1:]
last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
encode, gather, calls = text.encode, convert._gather, []

def told_in_set_up(*args, **kwargs):
    if kind == "set-up":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100)
    if kind == "launcher" and last:  # the other one waits for this rank
        time.sleep(1)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(100)
    return encode(*args, **kwargs)

def told_in_export(*args):
    calls.append(1)
    if kind == "export" and last and len(calls) == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    return gather(*args)

text.encode, convert._gather = told_in_set_up, told_in_export
train.main(options)
'''


@pytest.fixture
def phases(run: Run, model_dir: Path, corpus: Path, tmp_path: Path) -> Run:
    """phases(kind, *more, ranks=1): training to OUT, without checkpoints unless it is told to end."""
    (tmp_path / "phases.py").write_text(PHASES)

    def go(kind: str, *more: str, ranks: int = 1) -> CompletedProcess[str]:
        line = words(model_dir, corpus, tmp_path / "out", *more, ulysses=ranks, steps=3, save_every=100)
        line = [word for i, word in enumerate(line) if "--save-every" not in (word, line[i - 1])]
        began = time.monotonic()
        result = run("phases", kind, *line, ranks=ranks)
        assert time.monotonic() - began < 60
        return result

    return go


def test_before_there_is_anything_to_lose(phases: Run, tmp_path: Path) -> None:
    """At once, also while the main thread waits for other ranks; the launcher's other ranks too."""
    result = phases("set-up")
    assert result.returncode == EXIT_CODE == 143
    assert result.stderr.count("ended by SIGTERM before the first step; --resume starts there") == 1
    result = phases("launcher", ranks=2)
    assert result.returncode != 0
    assert result.stderr.count("ended by SIGTERM before the first step") == 1
    assert "lost contact" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_in_the_export(phases: Run, tmp_path: Path) -> None:
    """Told to one rank alone: both give it up, the last step is saved, and its export comes from there."""
    out = tmp_path / "out"
    result = phases("export", ranks=2)
    assert "ended by SIGTERM after step 3; --resume goes on from there" in result.stdout
    assert len(re.findall(r"exitcode +: 143", result.stderr)) >= 1, result.stderr
    assert "error on rank" not in result.stderr
    assert sorted(path.name for path in (out / "state").iterdir()) == ["step-00000003"]
    assert [path.name for path in out.iterdir() if "hf" in path.name] == []
    assert phases("none", "--resume", ranks=2).returncode == 0
    shutil.move(out, tmp_path / "resumed")
    assert phases("none", ranks=2).returncode == 0
    assert_same_result(tmp_path / "resumed", out)


def tell(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, when: Callable[..., bool]) -> None:
    """This process is told to end when `module.name` is called so."""
    real = getattr(module, name)

    def told(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # else it would end the tests
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, told)


def ended(line: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        usp(["train", *line])
    assert end.value.code == EXIT_CODE


def test_while_a_checkpoint_is_written(
    model_dir: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is finished, and so is that of the last step."""
    write = saving.write_pieces
    seen: list[str] = []

    def slow(folder: Path, *args: Any) -> Any:
        time.sleep(1.0)
        seen.append(folder.name)
        return write(folder, *args)

    def during(cfg: Any, step: int) -> bool:
        return step == 4 and not seen  # the save of step 3 has begun and not ended

    monkeypatch.setattr(saving, "write_pieces", slow)
    tell(monkeypatch, loop, "learning_rate", during)
    ended(words(model_dir, corpus, tmp_path / "out"))
    last = len(curve(tmp_path / "out"))
    assert seen == [f".step-{step:08d}.tmp" for step in (3, last)]
    assert sorted(path.name for path in (tmp_path / "out" / "state").iterdir()) == [
        f"step-{step:08d}" for step in (3, last)
    ]


def test_between_set_up_and_the_first_step(
    model_dir: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export of a run that goes on is gone as a whole, no step is done, and the run can go on."""
    out = tmp_path / "out"
    usp(["train", *words(model_dir, corpus, out, steps=3)])
    with monkeypatch.context() as patch:
        tell(patch, train, "start_folder", lambda *_: True)
        ended(words(model_dir, corpus, out, "--resume", steps=5))
    assert len(curve(out)) == 3
    assert [path.name for path in out.iterdir() if "hf" in path.name] == []
    usp(["train", *words(model_dir, corpus, out, "--resume", steps=3)])
    assert (out / "hf" / "model.safetensors").is_file()


def test_what_a_killed_process_leaves_is_no_content(model_dir: Path, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / ".config.json.tmp").write_text("{")
    (tmp_path / ".hf.1234.tmp").mkdir()
    usp(["train", *words(model_dir, corpus, tmp_path, steps=1)])
    assert not (tmp_path / ".hf.1234.tmp").exists()
    assert (tmp_path / "hf").is_dir()
