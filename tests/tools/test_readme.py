"""What the README says is run: its Python as doctests, its commands on a tiny model, for fewer steps."""

import doctest
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
Run = Callable[..., CompletedProcess[str]]


def commands() -> list[list[str]]:
    """Each command of the sh blocks, continued lines joined."""
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def test_python_snippets() -> None:
    failed, tried = doctest.testfile(str(README), module_relative=False)
    assert tried >= 10
    assert failed == 0


def test_commands(run: Run, model_dir: Path, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "runs" / "quickstart" / "model")
    shutil.copytree(corpus, tmp_path / "notes")
    (tmp_path / "book.txt").write_text("a long book " * 500)
    for words in commands():
        if words[0] == "torchrun":
            assert words[1] == "--nproc-per-node"
            assert words[3] == "-m"
            fewer = ["--steps", "2"] if words[4] == "usp.tools.train" else []
            result = run(*words[4:], *fewer, ranks=int(words[2]))
        else:
            assert words[0] == "usp"
            result = run("usp.tools.cli", *words[1:])
        assert result.returncode == 0, (words, result.stdout + result.stderr)
    assert (tmp_path / "runs" / "book" / "loss.png").is_file()
    assert (tmp_path / "runs" / "again" / "config.json").is_file()


@pytest.mark.parametrize(
    "target", re.findall(r"^make (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE)
)
def test_make_targets_exist(target: str) -> None:
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
