"""`usp bench`: formulas, rows, ratios, commands and what is refused."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from usp import models
from usp.mesh import TABLES
from usp.models.plan.local import local
from usp.tools.bench import memory, report, scaling
from usp.tools.bench.job import Job, Setting
from usp.tools.bench.jobs import Resources
from usp.tools.bench.main import not_run, scaling_lines
from usp.tools.bench.shape import shape, whole
from usp.tools.cli import main as usp
from usp.tools.config_bench import Bench
from usp.tools.flops import weights
from usp.tools.rates import Piece, Rates, step_time, total

TWO = {"dp": 1, "ring": 1, "ulysses": 2}
RATES = Rates(
    device="NVIDIA H200", processes=2, kernel="flash4", matmul=7e14, attention_forward=6.9e14,
    attention_backward=6.2e14, memory=4e12, to_host=5e10, from_host=5e10, all_to_all=1.5e11,
)  # fmt: skip


def test_dry_run_of_the_scaling(capsys: pytest.CaptureFixture[str]) -> None:
    usp(["bench", "--what", "scaling", "--gpus", "8", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    parts = scaling.parts(shape("llama-3-8b"), scaling.COUNTS, (131072, 1048576), 5, "cuda")
    every = [scaling.whole_part(whole("llama-3-8b"), n, 131072, "cuda") for n in scaling.COUNTS]
    parts += every
    assert [shlex.split(line, comments=True) for line in lines] == [
        ["usp", "bench", "--what", "scaling", "--gpus", "8", "--part", str(i)] for i in range(len(parts))
    ]
    long = [part.seconds > scaling.PART_LIMIT for part in parts]
    assert ["not run without" in line for line in lines] == long
    assert [(p.processes, p.seq_len) for p, is_long in zip(parts, long, strict=True) if is_long] == [
        (1, 1048576)
    ] * 2  # one GPU alone takes too long for a million tokens
    there = {(p.processes, p.seq_len, s.variant) for p in parts for s in p.settings}
    all_four = {"ulysses", "head chunks", "ulysses x ring", "odysseus"}
    for n, length in ((2, 262144), (4, 524288), (8, 1048576), (2, 1048576), (4, 1048576)):
        assert {variant for variant in all_four if (n, length, variant) in there} == all_four
    # twice as long would take longer than a part, or than two GPUs have room for; one has its own limit
    assert [p.seq_len for p in every] == [131072, 524288, 524288, 1048576]
    assert {p.asked()["layers"] for p in every} == {32}
    assert [p.settings[0].moments for p in every] == ["host", "device", "device", "device"]


def test_weak_scaling() -> None:
    rows = [
        {"variant": "ulysses", "world": n, "seq_len": n * length, "tflops_gpu": rate}
        for n, length, rate in ((1, 100, 600.0), (2, 100, 500.0), (8, 100, 480.0), (8, 25, 900.0))
    ]
    assert scaling.weak(rows, 100) == [{"variant": "ulysses", "from": 2, "to": 8, "ratio": 0.96}]
    assert scaling.weak(rows[:2], 100) == []
    assert [round(row["tflops_gpu"]) for row in scaling.published()] == [338, 411, 417, 222]
    row = {"variant": scaling.WHOLE, "world": 8, "seq_len": 1048576, "tokens_per_s_gpu": 946.0}
    ours = [
        line
        for line in scaling.lines([*rows, row, row | {"world": 4, "seq_len": 131072}], 100)
        if "ours" in line
    ]
    assert len(ours) == 1
    assert ours[0].endswith(
        "1048576 tokens on 8 H100: 473 tokens/s and 411 model TFLOP/s per GPU; ours 946, 2.00 times as many"
    )


@pytest.mark.parametrize("windows", [False, True])
def test_slope_and_longest_row(windows: bool, windowed_dir: Path) -> None:
    """A device that takes 1.25 times what is foretold; the longest row then just fits it."""
    model = str(windowed_dir) if windows else "llama-3-8b"
    cfg, gpu = shape(model, 8), 141 * 10**9
    rows = []
    for seq_len in (131072, 262144):
        (setting,) = (s for s in memory.ladder(cfg, seq_len, 2) if s.label == "+ offload")
        row: dict[str, Any] = {**setting.__dict__, "compile": True, "dtype": "bfloat16", "world": 2}
        row |= {"model": model, "layers": 8, "seq_len": seq_len}
        peak = memory.foretold(cfg, 2, seq_len // 2, ("usp", 1), memory.options(row)).peak
        base = peak.parts["parameters"] + peak.parts["moments"]
        row |= {"foretold": peak.nbytes, "foretold_base": base, "base": base}
        rows.append({**row, "peak": base + 1.25 * (peak.nbytes - base)})
    (found,) = memory.slopes(rows, gpu)
    assert found["growth"] == pytest.approx(1.25 * found["foretold_growth"])
    assert found["growth"] == pytest.approx((rows[1]["peak"] - rows[0]["peak"]) / 65536)
    large, tokens = shape(model, 32), found["longest"][8]["tokens"]
    at_most = memory.foretold(large, 8, tokens // 8, ("usp", 1), memory.options(rows[0]))
    base = at_most.peak.parts["parameters"] + at_most.peak.parts["moments"]
    assert base + 1.25 * (at_most.peak.nbytes - base) == pytest.approx(0.92 * gpu, rel=0.01)
    assert found["longest"][8]["host_gib"] == pytest.approx(at_most.host / 2**30)


def test_longest_row_where_ranks_have_fewer_heads_than_chunks() -> None:
    """8 chunks were measured on 2 GPUs; a rank of 8 has 4 of the 32 heads."""
    rows = []
    for seq_len in (131072, 262144):
        row: dict[str, Any] = {**Setting(label="8", head_chunks=8).__dict__, "compile": True}
        row |= {"dtype": "bfloat16", "world": 2, "model": "llama-3-8b", "layers": 8, "seq_len": seq_len}
        peak = memory.foretold(shape("llama-3-8b", 8), 2, seq_len // 2, ("usp", 1), memory.options(row)).peak
        rows.append({**row, "peak": peak.nbytes, "foretold": peak.nbytes, "foretold_base": 0, "base": 0})
    found = memory.slopes(rows, 141 * 10**9)
    assert [one["head_chunks"] for one in found[0]["longest"].values()] == [8, 8, 4]
    (line,) = memory.slope_lines(found)
    assert line.count("head chunks") == 1
    assert line.endswith("in 4 head chunks")


def test_layers_keep_the_order_of_their_windows(windowed_dir: Path) -> None:
    model = str(windowed_dir)
    assert shape(model).windows == (100, None, 100, 100)
    assert shape(model, 2).windows == (100, None)
    assert shape(model, 10).windows == ((100, None, 100, 100) * 3)[:10]
    row = {"model": model, "layers": 6, "world": 1, "seq_len": 1024, "variant": "ulysses"}
    run = report.Run("scaling", "", "", {"host_memory": 10**12}, [row])
    (said,) = (line for line in scaling_lines([row], [run], Bench(), 10**10) if "longest row" in line)
    assert "on 1 GPU, as the plan foretells: " in said
    assert "nothing fits" not in said


def test_a_peer_without_windows_says_so(windowed_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's context_parallel; the others are handed each layer's window."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    peers = ("deepspeed", "torch-cp")
    for model, errors in (
        (str(windowed_dir), {"torch-cp": "torch context_parallel has no sliding window"}),
        ("llama-3-8b", {}),
    ):
        rows = not_run(Bench(model=model, peers=peers), Resources(2, "cuda"))
        assert {row["contender"]: row["error"] for row in rows} == errors


@pytest.mark.parametrize("remat", ["none", "attention", "full"])
def test_step_time_is_that_of_its_work(remat: str) -> None:
    cfg, seq_len = shape("llama-3-8b"), 65536
    options: dict[str, Any] = {"remat": remat, "dtype": torch.bfloat16, "compile": True}
    held = models.training_memory(cfg, TABLES["usp"], TWO, batch=1, seq_len=seq_len, **options)
    sent = models.model_traffic(cfg, TABLES["usp"], TWO, batch=1, seq_len=seq_len, **options)
    where = local(cfg, TABLES["usp"], TWO, batch=1, seq_len=seq_len)
    pieces = step_time(where, sent, held, RATES, **options, accumulate=1, group=1)
    seconds = {piece.name: piece.seconds for piece in pieces}
    again = {"none": 0, "attention": 0, "full": 1}[remat]
    attention = seconds["attention, forward"] * RATES.attention_forward / (1 + again)
    attention += seconds["attention, backward"] * RATES.attention_backward
    layer, head = weights(cfg)
    products = seconds["matrix products"] * RATES.matmul
    if remat != "none":  # layers run again, but for the product whose value nothing reads
        products -= 2 * 8 * (layer - 4096 * 14336) * seq_len / 2
    assert products == pytest.approx(6 * (8 * layer + head) * seq_len / 2)
    # the backward of attention is five products where the model's FLOPs count four
    assert attention == pytest.approx(3.5 / 3 * 6 * 8 * 4096 * seq_len**2 / 2)
    assert total([Piece("a", 3.0), Piece("b", 1.0, True)]) == 3.0
    assert total([Piece("a", 3.0), Piece("b", 4.0, True)]) == 4.0


@pytest.mark.parametrize("accumulate", [1, 4])
def test_moments_travel_once_a_step(accumulate: int) -> None:
    """Behind nothing, unlike what is kept for the backward, which goes with every part of the step."""
    cfg, options = shape("llama-3-8b"), {"remat": "attention", "dtype": torch.bfloat16}
    seconds = []
    for moments in ("device", "host"):
        held = models.training_memory(
            cfg,
            TABLES["usp"],
            TWO,
            batch=1,
            seq_len=65536,
            moments=moments,
            offload="host",
            **options,  # type: ignore[arg-type]
        )
        sent = models.model_traffic(cfg, TABLES["usp"], TWO, batch=1, seq_len=65536, **options)  # type: ignore[arg-type]
        where = local(cfg, TABLES["usp"], TWO, batch=1, seq_len=65536)
        pieces = step_time(
            where,
            sent,
            held,
            RATES,
            **options,
            compile=False,
            accumulate=accumulate,
            group=1,  # type: ignore[arg-type]
        )
        seconds.append({piece.name: piece for piece in pieces})
    device, host = seconds
    away = host.pop("moments to the GPU and back")
    assert host == device
    parameters = held.peak.parts["parameters"]
    assert not away.hidden
    assert away.seconds == pytest.approx(2 * parameters * (1 / RATES.to_host + 1 / RATES.from_host))


def test_plan_tells_the_time_once_rates_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["plan", "llama-3-8b", "--seq-len", "131072", "--ulysses", "2"]
    usp(words)
    assert (
        "no step time: the rates of a machine are not known. Run `usp bench --calibrate`"
        in capsys.readouterr().out
    )
    RATES.write(tmp_path / "usp" / "rates.json")
    assert Rates.read(tmp_path / "usp" / "rates.json") == RATES
    usp(words)
    text = capsys.readouterr().out
    assert "tokens/s per GPU, at the rates of NVIDIA H200 as measured with 2 processes" in text
    assert "  matrix products" in text
    usp([*words, "--gpu", "b200"])
    assert "has the rates of NVIDIA H200, not of b200" in capsys.readouterr().out
    elsewhere = replace(RATES, device="NVIDIA B200")
    elsewhere.write(tmp_path / "b200.json")
    usp([*words, "--gpu", "b200", "--rates", str(tmp_path / "b200.json")])
    assert "tokens/s per GPU, at the rates of NVIDIA B200" in capsys.readouterr().out
    (tmp_path / "usp" / "rates.json").write_text("{}")
    with pytest.raises(SystemExit, match="must be written by usp bench --calibrate"):
        usp(words)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (
            ["--what", "kernel", "--peers", "none"],
            r"peers=\('none',\) must be left out where it has no effect",
        ),
        (["--calibrate", "--steps", "2"], "steps=2 must be left out"),
        (
            ["--peers", "yunchang"],
            "peers=yunchang must be auto, none or of deepspeed, torch-cp, transformers",
        ),
        (["--gpus", "3"], "gpus=3 must be at most those that are visible, got 0"),
        (["--what", "scaling", "--seq-len", "8"], "must be two numbers for scaling"),
        (["--what", "scaling", "--part", "99"], "part=99 must be from 0 to"),
        (["--window", "64"], "window=64 must be left out where it has no effect, got step; it is for memory"),
        (["--dry-run"], "dry_run=True must be left out where it has no effect, got step; it is for scaling"),
        (
            ["--setting", "remat=full,", "group=2"],
            "setting='remat=full,' must be name=value,name=value",
        ),
        (["--what", "memory", "--window", "0"], "window=0 must be at least 1"),
        (["--setting", "tile=3"], "setting='tile=3' must use table, ring, remat"),
        (["--setting", "offload=3"], "must give offload a name, got '3'"),
        (["--setting", "mlp_tile=-4"], "must give mlp_tile a whole number, got '-4'"),
        (["--setting", "remat=foo"], "remat='foo' must be one of none, full, attention"),
        (["--setting", "head_chunks=3"], "head_chunks=3 must be from 1 to the 2 query heads of a rank"),
        (
            ["--what", "scan", "--kernel", "foo"],
            "kernel=foo must be one of auto, cpu, tiled, reference on a CPU",
        ),
        (["--kernel", "flash4"], "kernel=flash4 must be one of auto, cpu, tiled, reference on a CPU"),
        (["--peers", "none", "deepspeed"], "peers=none deepspeed must hold none alone"),
        (["--what", "scaling", "--dry-run", "--part", "0"], "part=0 must be left out with dry_run"),
        (["--plot"], "plot must name JSON files"),
        (["--plot", "nowhere.json"], "nowhere.json must be a file, and is not there"),
        (["--setting", "ring=3"], "ring=3 must divide the processes, got 2"),
        (["--setting", "table=ulysses,ring=2"], "ring=2 must be 1 where it cuts nothing, got table=ulysses"),
        (["--model", "nothing"], "model=nothing must be"),
    ],
)
def test_refused(words: list[str], match: str) -> None:
    with pytest.raises(SystemExit, match=match):
        usp(["bench", *words])


def test_a_setting_in_words() -> None:
    setting = Setting.parse("remat=full,group=2,mlp_tile=None,compile=False")
    assert Setting.parse("remat=full, group=2").group == 2
    assert (setting.remat, setting.group, setting.mlp_tile, setting.compile) == ("full", 2, None, False)
    job = Job(
        what="step", contender="usp", model="tiny", layers=2, seq_lens=(8,), processes=1, device="cpu",
        settings=(setting,),
    )  # fmt: skip
    assert [row["label"] for row in job.expected()] == ["remat=full,group=2,mlp_tile=None,compile=False"]
