"""What a user can get wrong: one message, no traceback of ours, all ranks out, no hang."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from usp.tools.cli import main as usp
from usp.tools.config import Train
from usp.tools.options import check_options
from usp.tools.setup import check_config

Run = Callable[..., CompletedProcess[str]]
FORM = re.compile(r"^error(?: on rank \d+)?: [\w -]+=\S+ must .+[.:] ?.*[.)]$", re.MULTILINE)


def words(model: Path, data: Path, out: Path, **changed: Any) -> list[str]:
    """The options of a run; names in `changed` are written with _ for -, and replace those before them."""
    options = {"model": model, "data": data, "out": out, "seq_len": 16, "steps": 1, **changed}
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def refused(result: CompletedProcess[str], message: str) -> None:
    output = result.stdout + result.stderr
    assert result.returncode != 0, output
    assert len(re.findall(r"^error", output, re.MULTILINE)) == 1, output
    assert message in output, output
    assert FORM.search(output), output
    theirs = len(re.findall(r"^torch\.\S+\.ChildFailedError", output, re.MULTILINE))
    assert output.count("Traceback") == theirs <= 1, output  # torchrun reports failed children in its own way
    if theirs:  # at length; the last of it says what was wrong
        assert message in output.rpartition("Root Cause")[2], output


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "latin.txt").write_bytes("Größe".encode("latin-1"))
    (folder / "empty.txt").write_text("")
    (folder / "full").mkdir()
    (folder / "full" / "file").write_text("x")
    (folder / "nothing").mkdir()
    return {p.stem: p for p in folder.iterdir()}


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "world_size": ({"ulysses": 4}, "must equal dp * ring * ulysses, got 1 * 1 * 4 = 4."),
    "latin": ({"data": "latin"}, "latin.txt must be UTF-8 text, got byte 0xf6 at offset 2."),
    "full": ({"out": "full"}, "must be new or an empty folder"),
    "short": ({"seq_len": 1}, "seq_len=1 must be at least 2, got ring=1 ulysses=1."),
    "empty": ({"data": "empty"}, "empty.txt must hold text, got 1 empty files."),
    "no_model": ({"model": "nothing"}, "must be a Hugging Face model directory, got no config.json in it."),
    "no_data": ({"data": "absent"}, "data=absent must exist, got no such file or folder."),
    "table": ({"table": "none"}, "table=none must be one of"),
}


@pytest.fixture
def changed(model_dir: Path, corpus: Path, bad: dict[str, Path], tmp_path: Path) -> Callable[..., list[str]]:
    """The command line of a case."""

    def go(name: str, **more: Any) -> list[str]:
        base = {"model": model_dir, "data": corpus, "out": tmp_path / "out", **more}
        return words(**{**base, **{key: bad.get(str(v), v) for key, v in CASES[name][0].items()}})

    return go


def test_two_ranks_say_it_once(run: Run, changed: Callable[..., list[str]], tmp_path: Path) -> None:
    """In a file that is read late; what options alone decide: test_refused_ranks.py."""
    refused(run("usp.tools.train", *changed("latin", ulysses=2), ranks=2), CASES["latin"][1])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", CASES)
def test_one_rank_says_it(
    changed: Callable[..., list[str]], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = changed(name)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        usp(["train", *args])
    said = capsys.readouterr()
    refused(CompletedProcess([], int(str(ended.value.code)), said.out, said.err), CASES[name][1])
    assert not (tmp_path / "out").exists()


def test_token_outside_the_vocabulary(
    make_model: Callable[..., Path], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path / "small", vocab_size=20)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        usp(["train", *words(model, corpus, tmp_path / "out")])
    assert "must be below the model's vocabulary, got vocab_size=20." in capsys.readouterr().err


def test_fewer_heads_than_ranks(
    run: Run, make_model: Callable[..., Path], corpus: Path, tmp_path: Path
) -> None:  # case H52
    """One head over two ranks trains as on one; float32 sums of another order."""
    model = make_model(tmp_path / "one", num_heads=1, num_kv_heads=1)
    losses = []
    for ranks in (1, 2):
        out = tmp_path / f"out{ranks}"
        result = run("usp.tools.train", *words(model, corpus, out, ulysses=ranks), ranks=ranks)
        assert result.returncode == 0, result.stderr
        losses.append(json.loads((out / "metrics.jsonl").read_text())["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("module", ["usp.tools.train", "usp.tools.eval"])
def test_a_length_that_is_none(
    run: Run, model_dir: Path, corpus: Path, tmp_path: Path, module: str, ranks: int
) -> None:
    line = ["--model", str(model_dir), "--data", str(corpus), "--seq-len", "512x"]
    line += ["--out", str(tmp_path / "out")]
    result = run(module, *line, ranks=ranks)
    assert result.returncode == 1
    message = r"^error(?: on rank 0)?: '512x' must be a number of tokens, .* Change that length\.$"
    assert len(re.findall(message, result.stderr, re.MULTILINE)) == 1, result.stderr


def test_unknown_option_is_said_once(run: Run, model_dir: Path, corpus: Path, tmp_path: Path) -> None:
    result = run("usp.tools.train", *words(model_dir, corpus, tmp_path / "out", colour="red"), ranks=2)
    assert result.returncode != 0
    assert (result.stdout + result.stderr).count("Unrecognized options:") == 1


def test_a_fault_only_one_rank_sees_ends_all(run: Run, tmp_path: Path) -> None:
    (tmp_path / "one_rank.py").write_text(
        "from usp.tools.ranks import start\n"
        "ranks = start()\n"
        "def look():\n"
        "    if ranks.rank == 1: raise ValueError('data=x must exist, got nothing. Correct the path.')\n"
        "ranks.checked(look)\n"
        "print('went on')\n"
    )
    result = run("one_rank", ranks=3)
    refused(result, "error on rank 1: data=x must exist")
    assert "went on" not in result.stdout


def test_rules_between_options() -> None:
    base = Train(model=Path("m"), data=(Path("d"),), out=Path("/none/out"), seq_len=64)
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"dp": 2, "batch_size": 3}, 2, r"batch_size=3 must be a multiple of dp \* accumulate, got dp=2"),
        ({"accumulate": 2, "batch_size": 3}, 1, "got dp=1 accumulate=2"),
        ({"remat": "none", "group": 2}, 1, "remat=none must come without groups"),
        ({"mlp_tile": 0}, 1, "mlp_tile=0 must be at least 1"),
        ({"head_chunks": 0}, 1, "head_chunks=0 must be at least 1"),
        ({"offload": "host", "mlp_tile": 9}, 1, "remat=auto must come without offload, mlp_tile"),
        ({"steps": 0}, 1, "steps=0 must be at least 1"),
        ({"lr": -1.0}, 1, r"lr=-1.0 must be a number of 0 or more"),
        ({"lr": float("nan")}, 1, r"lr=nan must be a number of 0 or more"),
        ({"seed": -1}, 1, r"seed=-1 must be a number of 0 or more"),
        ({"save_every": 0}, 1, "save_every=0 must be at least 1"),
        ({"keep": 0}, 1, "keep=0 must be at least 1"),
        ({"timeout": 0.5}, 1, "timeout=0.5 must be a number of seconds from 1 to 10000000"),
        ({"timeout": float("inf")}, 1, "timeout=inf must be a number of seconds"),
        ({"lr": float("inf")}, 1, "lr=inf must be a number of 0 or more"),
        ({"ulysses": 0}, 0, "ulysses=0 must be at least 1"),
        ({"table": "replicated", "ulysses": 2}, 2, "ulysses=2 must be 1 where it cuts nothing"),
        ({"seq_len": 3, "ulysses": 4}, 4, "seq_len=3 must be at least 4, got ring=1 ulysses=4"),
    ]

    def check(cfg: Train, world: int) -> None:
        check_config(cfg, world)
        check_options(cfg)

    for changed, world, message in cases:
        with pytest.raises(ValueError, match=message):
            check(dataclasses.replace(base, **changed), world)


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ("nothing", "new", "must be a Hugging Face model directory or one in usp's format"),
        ("nothing", "full", "must be new or an empty folder"),
    ],
)
def test_convert_refuses(bad: dict[str, Path], tmp_path: Path, src: str, dst: str, message: str) -> None:
    target = bad.get(dst, tmp_path / dst)
    with pytest.raises(SystemExit, match=message):
        usp(["convert", str(bad[src]), str(target), "--to", "usp"])
    assert not (tmp_path / "new").exists()
