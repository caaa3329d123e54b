"""`usp plan`: everything is printed, nothing is started."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from transformers import AutoConfig

from usp.models import LlamaConfig
from usp.models.config import Rope
from usp.models.plan.settings import Settings
from usp.tools.bench.job import Setting
from usp.tools.cli import main as usp
from usp.tools.config import Train
from usp.tools.config_bench import Bench
from usp.tools.options import asked_for
from usp.tools.presets import MODELS
from usp.tools.setup import positions_note

FOUR = ["--batch-size", "4", "--accumulate", "4"]
Capture = pytest.CaptureFixture[str]


def said(capsys: Capture, *words: str) -> str:
    usp(["plan", *words])
    return capsys.readouterr().out


def test_all_of_it(capsys: Capture) -> None:
    text = said(capsys, "llama-3-8b", "--seq-len", "1048576", "--ulysses", "4", "--ring", "2")
    for part in (
        "table 'usp' on dp 1 x ring 2 x ulysses 4",
        "q         P('dp', 'ring', 'ulysses', None)",
        "each of 32 layers, forward",
        "each of 32 layers, backward",
        "p2p 3.0 GiB, gather 2.0 GiB; gather, as all keys",
        "Ulysses         ulysses              1.9 GiB     1.9 GiB  each way 2 i B S (N + K) H (P-1) / P^2",
        "ring            ring               512.0 MiB     1.5 GiB  2 B S K H times i (P-1) / P, back (i + w)",
        "ZeRO-3          ring+ulysses       364.0 MiB   728.0 MiB  i W (P-1) / P, back w W (P-1) / P",
        "kept for the backward",
        "moments",
        "fits: ",
    ):
        assert part in text
    # 131072 tokens of a rank, (32 + 16) heads of 128 in bfloat16, 3 of 4 parts leave
    assert re.search(r"q, k, v +1 all_to_all +ulysses 4 +1\.1 GiB", text)
    assert not torch.distributed.is_initialized()


def one_kv(folder: Path) -> str:
    """A model of 8 query heads that share one kv head."""
    cfg = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=8, num_kv_heads=1
    )
    (folder / "config.json").write_text(json.dumps(cfg.to_hf_dict()))
    return str(folder)


@pytest.mark.parametrize(
    ("ring", "ulysses", "chunks", "way", "reason"),
    [
        (8, 1, 1, "gather", "all keys (8 x 1 heads) take no more room than q (8 heads)"),
        (4, 4, 1, "p2p", "all keys (4 x 1 heads) take more room than q (2 heads)"),
        # with the heads of the whole model the keys would be gathered
        (4, 4, 2, "p2p", "all keys of a chunk (4 x 1 heads) take more room than q (1 heads)"),
        (2, 2, 2, "gather", "all keys of a chunk (2 x 1 heads) take no more room than q (2 heads)"),
        (2, 2, 4, "p2p", "all keys of a chunk (2 x 1 heads) take more room than q (1 heads)"),
        # chunks of 2, 3 and 3 heads
        (2, 1, 3, "gather", "all keys of a chunk (2 x 1 heads) take no more room than q (2 heads)"),
    ],
)  # fmt: skip
def test_how_a_ring_shares_its_keys(
    ring: int, ulysses: int, chunks: int, way: str, reason: str, tmp_path: Path, capsys: Capture
) -> None:
    words = ["--seq-len", "1048576", "--ring", str(ring), "--ulysses", str(ulysses), "--remat", "full"]
    text = said(capsys, one_kv(tmp_path), *words, "--head-chunks", str(chunks))
    assert f"; {way}, as {reason}" in text
    rows = re.findall(rf"keys of the ring +\d+ (\w+) +ring {ring} +([\d.]+) MiB", text)
    assert len(rows) == 3 * chunks  # forward, run again, and once more in the backward
    assert {kind for kind, _ in rows} == {"shift" if way == "p2p" else "all_gather"}
    # the line's bytes are those of the rows: keys twice, and their gradients in float32
    hops, home = ring - 1, ring if way == "p2p" else ring - 1
    keys = float(rows[0][1]) * chunks / hops
    printed = re.search(rf"{way} ([\d.]+) MiB", text)
    assert printed is not None
    assert float(printed[1]) == pytest.approx(keys * (2 * hops + 2 * home), rel=0.005)  # rounded to 0.1 MiB


def test_own_settings_and_verdict(capsys: Capture) -> None:
    words = ["qwen3-4b", "--seq-len", "262144", "--ulysses", "2", "--table", "ulysses"]
    options = ["--remat", "attention", "--mlp-tile", "4096", "--head-chunks", "2"]
    assert "fits: " in said(capsys, *words, *options, "--gpu", "h200")
    text = said(capsys, *words, *options, "--gpu-memory", "40GB")
    assert "DOES NOT FIT: " in text
    assert "settings: remat=attention, mlp_tile=4096, head_chunks=2" in text
    assert "note: positions reach 262144, beyond the 40960 that the model knows (rope_type default)" in text
    assert "note: " not in said(capsys, *words, "--seq-len", "32K")


def test_longest(capsys: Capture) -> None:
    text = said(capsys, "smollm2-135m", "--longest", "--ulysses", "2", "--gpu-memory", "24GB")
    assert re.search(r"1 x \d{6,} tokens on 2 GPUs", text)
    assert "fits: " in text


@pytest.mark.parametrize(
    "words",
    [
        ["--seq-len", "128K", "--ulysses", "2"],
        ["--longest", "--ulysses", "2", "--ring", "2", "--moments", "host"],
        ["--seq-len", "32K", "--remat", "attention", "--stored", "3", "--moments", "host", "--group", "2"],
        ["--seq-len", "32K", "--dtype", "float32", "--no-compile"],
        ["--seq-len", "32K", "--no-compile", "--table", "odysseus", "--ulysses", "2"],
        ["--seq-len", "32K", "--dp", "2", "--batch-size", "4", "--accumulate", "2"],
    ],
)
def test_what_it_says_can_be_given_to_the_others(words: list[str], capsys: Capture) -> None:
    """`usp train`, `usp bench` and `usp plan` itself read the chosen settings as they are printed."""
    text = said(capsys, "llama-3-8b", *words)
    settings = re.search(r"settings: (.*)", text)
    to_train = re.search(r"(?m)^(?:usp train|torchrun --nproc-per-node [24] -m usp.tools.train) (.*)", text)
    to_bench = re.search(r"(?m)^usp bench (.*)", text)
    assert settings
    assert to_train
    again = said(capsys, "llama-3-8b", *to_train[1].replace("--compile off", "--no-compile").split())
    same = [line for line in text.split("\n") if not line.startswith("  too much")]
    assert again.split("\n") == same
    dtype = "float32" if "float32" in words else "auto"
    given = tyro.cli(Train, args=["--model", "m", "--data", "d", "--out", "o", *to_train[1].split()])
    assert Settings(**asked_for(given, 32), moments=given.moments).describe().startswith(settings[1])
    assert (given.compile, given.dtype) == ("off" if "--no-compile" in words else "auto", dtype)
    if "float32" in words or "--dp" in words:  # what the bench does not measure
        assert to_bench is None
        return
    assert to_bench
    bench = tyro.cli(Bench, args=to_bench[1].split())
    (one,) = (Setting.parse(text) for text in bench.setting)
    for name, value in (pair.split("=") for pair in settings[1].split(", ")):
        assert str(getattr(one, name)) == value
    assert one.compile is (False if "--no-compile" in words else None)
    assert one.table == ("odysseus" if "odysseus" in words else "usp")
    assert Setting.parse(settings[1]) == replace(one, ring=1, table="usp", compile=None, label=settings[1])
    assert bench.variants == ()


def test_settings_in_words() -> None:
    assert Settings(remat=("full",) * 3 + ("none",)).describe() == "remat=full, stored=1"
    assert Settings(remat=("none", "none")).describe() == "remat=none"
    for remat in (("full", "attention"), ("full", "none", "full"), ("none", "full")):
        with pytest.raises(ValueError, match="must be one name, then none for the last layers"):
            Settings(remat=remat).words()


def test_no_note_where_the_rope_is_stretched() -> None:
    """As Qwen writes it: yarn with a factor, and max_position_embeddings of before."""
    rope = Rope(rope_type="yarn", factor=4.0, original_max_position=32768)
    cfg = replace(MODELS["qwen3-4b"], max_position=32768, rope=rope)
    assert positions_note(cfg, 131072) is None
    assert "beyond the 131072 that the model knows (rope_type yarn)" in str(positions_note(cfg, 131073))


def test_rows_of_a_step_are_counted_as_in_training(capsys: Capture) -> None:
    """4 rows in 4 parts are worked on as one row is."""
    one = said(capsys, "llama-3-8b", "--seq-len", "128K", "--ulysses", "8")
    four = said(capsys, "llama-3-8b", "--seq-len", "128K", "--ulysses", "8", *FOUR)
    kept = re.compile(r"kept for the backward +\S+ GiB")
    assert kept.findall(one) == kept.findall(four) != []
    assert "4 x 131072 tokens in 4 parts on 8 GPUs" in four


def test_a_directory(model_dir: Path, capsys: Capture) -> None:
    text = said(capsys, str(model_dir), "--seq-len", "64", "--dp", "2", "--table", "replicated")
    assert "each of 2 layers, forward\n    nothing" in text
    assert "gradients" in text


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (
            ["llama-3-8b", "--seq-len", "1.3K"],
            "'1.3K' must be a number of tokens, such as 131072, 128K or 1.5M",
        ),
        (["llama-3-8b"], "seq_len=None must be a number of tokens"),
        (["nothing", "--seq-len", "8"], "must be a Hugging Face model directory or one of"),
        (["llama-3-8b", "--seq-len", "8", "--longest"], "seq_len=8 must be left out with --longest"),
        (["llama-3-70b", "--longest"], "no length fits: seq_len=2 must fit gpu_memory="),
        (["llama-3-8b", "--seq-len", "8", "--table", "none"], "table=none must be one of"),
        (["llama-3-8b", "--seq-len", "8", "--gpu-memory", "much"], "gpu-memory=much must be a size"),
        (["llama-3-8b", "--seq-len", "8", "--group", "2"], "remat=auto must come without group"),
        (["llama-3-8b", "--seq-len", "8", "--stored", "2"], "remat=auto must come without stored"),
        (["llama-3-8b", "--seq-len", "8", "--stored", "2", "--remat", "none"], "must come without groups"),
        (
            ["llama-3-8b", "--seq-len", "8", "--stored", "-1", "--remat", "full"],
            "stored=-1 must be 0 or more",
        ),
        (
            ["llama-3-8b", "--seq-len", "8", "--stored", "32", "--remat", "full"],
            "stored=32 must be less than the model's layers, got num_layers=32",
        ),
        (["llama-3-8b", "--seq-len", "8", *FOUR[:2], "--accumulate", "3"], "batch_size=4 must be a multiple"),
        (
            ["smollm2-135m", "--seq-len", "2048M", "--remat", "full"],
            "must leave a rank at most 2147483647 tokens",
        ),
        (
            [
                "llama-3-8b",
                "--seq-len",
                "1M",
                "--ulysses",
                "8",
                "--table",
                "odysseus",
                "--remat",
                "full",
                "--head-chunks",
                "2",
            ],
            "head_chunks=2 must be 1 where attention's weights stay cut by head",
        ),
        (["llama-3-8b", "--seq-len", "4M", "--ulysses", "2"], "host_memory=186.3 GiB for each rank, got at"),
        (["llama-3-8b", "--seq-len", "67108864", "--dp", "2"], "must fit gpu_memory="),
        (["llama-3-8b", "--seq-len", "8", "--ulysses", "2", "--batch-size", "0"], "batch_size=0 must be"),
    ],
)
def test_refused(words: list[str], match: str) -> None:
    with pytest.raises(SystemExit, match=match):
        usp(["plan", *words])


@pytest.mark.parametrize("name", MODELS)
def test_presets_are_whole(name: str) -> None:
    """They go to Transformers' config.json and back."""
    fields: dict[str, Any] = json.loads(json.dumps(MODELS[name].to_hf_dict()))
    assert asdict(LlamaConfig.from_hf_dict(fields)) == asdict(MODELS[name])
    assert AutoConfig.for_model(**fields).hidden_size == MODELS[name].hidden_size
