"""`usp eval`: Transformers' loss on one process, and the same on two."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from usp.tools.cli import main as usp

Run = Callable[..., CompletedProcess[str]]


def by_transformers(model_dir: Path, corpus: Path, seq_len: int) -> tuple[float, int]:
    """Rows as the tool packs them, document by document."""
    from transformers import AutoModelForCausalLM

    from usp.tools import text

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    texts = text.read_documents(text.find_files([corpus], include=(".txt",)))
    docs = text.encode(texts, text.load_tokenizer(model_dir), vocab_size=300)
    total, count = 0.0, 0
    for row in text.Packed(docs=docs, seq_len=seq_len).rows():
        for start, stop in pairwise(row.bounds):
            ids = torch.from_numpy(row.tokens[start:stop]).long()[None]
            if start < row.length and stop - start > 1:
                with torch.no_grad():
                    total += float(model(ids, labels=ids).loss) * (stop - start - 1)
                count += stop - start - 1
    return total / count, count


@pytest.mark.parametrize("batch_size", ["1", "4"])
def test_one_process(model_dir: Path, corpus: Path, tmp_path: Path, batch_size: str) -> None:
    out = tmp_path / "result.json"
    words = ["--model", str(model_dir), "--data", str(corpus), "--seq-len", "37", "--out", str(out)]
    usp(["eval", *words, "--batch-size", batch_size])
    found = json.loads(out.read_text())
    loss, count = by_transformers(model_dir, corpus, 37)
    assert found["tokens"] == count
    assert found["loss"] == pytest.approx(loss, rel=1e-5)


def test_two_processes(run: Run, model_dir: Path, corpus: Path, tmp_path: Path) -> None:
    # cases H18, H62, H64: the same number however rows and sequence are cut
    rows = {}
    cut = ["--ulysses", "2"]
    for name, words in {
        "usp": cut, "chunks": [*cut, "--head-chunks", "2"], "dp": ["--dp", "2", "--batch-size", "3"],
    }.items():  # fmt: skip
        out = tmp_path / f"{name}.json"
        given = ["--model", str(model_dir), "--data", str(corpus), "--seq-len", "37", "--out", str(out)]
        result = run("usp.tools.eval", *given, *words, ranks=2)
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.count("perplexity") == 1
        rows[name] = json.loads(out.read_text())
    loss, count = by_transformers(model_dir, corpus, 37)
    for found in rows.values():
        assert found["tokens"] == count
        assert found["loss"] == pytest.approx(loss, rel=1e-5)


def test_refused(model_dir: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        usp(["eval", "--model", str(model_dir), "--data", str(corpus), "--seq-len", "1"])
    assert "seq_len=1 must be at least 2" in capsys.readouterr().err
