"""Work that is counted: by bench, train and plan; with sliding windows too."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from usp import models, value_and_grad
from usp.kernels import KERNELS
from usp.mesh import TABLES
from usp.models.plan.local import local
from usp.tools import loop
from usp.tools.bench.job import Setting
from usp.tools.bench.place import Place
from usp.tools.bench.shape import TINY, shape
from usp.tools.bench.step import Model
from usp.tools.config import Train
from usp.tools.flops import flops_per_token, peak_flops, weights
from usp.tools.metrics import Metrics, read_rows
from usp.tools.ranks import Ranks
from usp.tools.rates import Rates, step_time

CFG = replace(TINY, num_layers=3, num_heads=6, num_kv_heads=2, hidden_size=40, head_dim=16)
SEQ = 48
ONE = Rates(
    device="", processes=2, kernel="", matmul=1.0, attention_forward=1.0, attention_backward=1.0, memory=1.0,
    to_host=1.0, from_host=1.0,
)  # fmt: skip


def attended(window: int) -> int:
    """Operations of one head's attention, every query by itself with the keys that it sees."""
    q, k, v = (torch.randn(SEQ, 16, requires_grad=True) for _ in range(3))

    def one(i: int) -> Tensor:
        seen = slice(max(0, i - window + 1), i + 1)
        return (q[i : i + 1] @ k[seen].T).softmax(-1) @ v[seen]

    with FlopCounterMode(display=False) as counter:
        torch.cat([one(i) for i in range(SEQ)]).sum().backward()  # type: ignore[no-untyped-call]
    return counter.get_total_flops()


def test_flops_are_the_models_own() -> None:
    """Counted product by product: reference attention works on the whole square, of which causal is half."""
    model = Model(CFG, Setting(label=""), Place(0, 1, 1, torch.device("cpu"), Path()))
    shard, mesh = model.shard(SEQ), model.mesh
    loss = value_and_grad(
        lambda p: models.loss(p, shard, CFG, table=model.table, mesh=mesh, kernel="reference")
    )
    with FlopCounterMode(display=False) as counter:
        loss(model.params)
    layer, head = weights(CFG)
    square = 12 * 3 * 6 * 16 * SEQ
    assert counter.get_total_flops() == (6 * (3 * layer + head) + square) * SEQ
    assert flops_per_token(CFG, SEQ) == 6 * (3 * layer + head) + square / 2


def test_flops_of_windows() -> None:
    """Of attention's exact ones the custom leaves out half of a diagonal of W for a window of W."""
    layer, head = weights(CFG)
    attention = sum(6 * (attended(window) - 12 * 16 * window / 2) for window in (SEQ, 20, 7))
    cfg = replace(CFG, windows=(None, 20, 7))
    assert flops_per_token(cfg, SEQ) * SEQ == pytest.approx(6 * (3 * layer + head) * SEQ + attention)
    full = 6 * 3 * (attended(SEQ) - 12 * 16 * SEQ / 2)
    assert flops_per_token(CFG, SEQ) * SEQ == pytest.approx(6 * (3 * layer + head) * SEQ + full)


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2)])
def test_step_time_of_windows(ulysses: int, ring: int) -> None:
    """Layers that are run again count with their own windows: 2 and 4, which end a group, once more, the
    others of both groups twice, the last three not at all."""
    seq_len, table, sizes = 8192, TABLES["usp"], {"dp": 1, "ring": ring, "ulysses": ulysses}
    windows = (1000, None, 3000, 1000, None, 9000, 1000, None)
    cfg = replace(shape("llama-3-8b"), windows=windows)
    options: dict[str, Any] = {"remat": ["full"] * 5 + ["none"] * 3, "group": 3, "dtype": torch.bfloat16}
    held = models.training_memory(cfg, table, sizes, batch=1, seq_len=seq_len, **options)
    sent = models.model_traffic(cfg, table, sizes, batch=1, seq_len=seq_len, **options)
    where = local(cfg, table, sizes, batch=1, seq_len=seq_len)
    pieces = step_time(where, sent, held, ONE, **options, accumulate=2, compile=True)
    seconds = {piece.name: piece.seconds for piece in pieces}
    pairs = []
    for window in (min(window or seq_len, seq_len) for window in windows):
        seen = sum(min(i + 1, window) for i in range(seq_len))  # each query itself, which is counted half
        pairs.append(seen - window / 2)
    runs = (3, 3, 2, 3, 2, 1, 1, 1)
    forward = sum(n * p for n, p in zip(runs, pairs, strict=True))
    # 2 products of 2 operations over 32 heads of 128, cut over 2 ranks; 5 products back; 2 parts of a step
    assert seconds["attention, forward"] == pytest.approx(2 * 4 * 32 * 128 * forward / 2)
    assert seconds["attention, backward"] == pytest.approx(2 * 10 * 32 * 128 * sum(pairs) / 2)


class Products(TorchDispatchMode):
    """Operations of matrix products as torch counts them, and those in place, which it leaves out. Those of
    kernels that `outside` has taken hold of are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.counter, self.more = FlopCounterMode(display=False), 0

    def outside(self, run: Any) -> Any:
        def counted(*args: Any) -> Any:
            before = self.counter.get_total_flops()
            found = run(*args)
            self.more -= self.counter.get_total_flops() - before
            return found

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm_.default:
            self.more += 2 * args[1].shape[0] * args[1].shape[1] * args[2].shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("remat", "group", "mlp_tile", "head_chunks"),
    [
        ("full", 1, None, 1),
        ("attention", 1, 7, 1),
        ("none", 1, 7, 2),
        ("full", 2, 7, 2),
        ("attention", 3, None, 2),
        (["attention", "none", "full"], 2, 7, 2),
    ],
)
def test_products_are_those_of_a_step(
    remat: str | list[str],
    group: int,
    mlp_tile: int | None,
    head_chunks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted as they are made: what is run again, what is not, and what tiles and chunks make again."""
    model = Model(CFG, Setting(label=""), Place(0, 1, 1, torch.device("cpu"), Path()))
    shard, table, sizes = model.shard(SEQ), model.table, {"dp": 1, "ring": 1, "ulysses": 1}
    options: dict[str, Any] = {
        "remat": remat, "group": group, "mlp_tile": mlp_tile, "head_chunks": head_chunks,
    }  # fmt: skip
    products, tiled = Products(), KERNELS["tiled"]
    own = tiled._replace(forward=products.outside(tiled.forward), backward=products.outside(tiled.backward))
    monkeypatch.setitem(KERNELS, "tiled", own)
    loss = value_and_grad(
        lambda p: models.loss(p, shard, CFG, table=table, mesh=model.mesh, kernel="tiled", **options)
    )
    with products.counter, products:
        loss(model.params)
    held = models.training_memory(CFG, table, sizes, batch=1, seq_len=SEQ, **options)
    sent = models.model_traffic(CFG, table, sizes, batch=1, seq_len=SEQ, **options)
    where = local(CFG, table, sizes, batch=1, seq_len=SEQ)
    pieces = step_time(where, sent, held, ONE, dtype=torch.float32, compile=False, accumulate=1, **options)
    said = next(piece.seconds for piece in pieces if piece.name == "matrix products")
    assert said == products.counter.get_total_flops() + products.more


@pytest.mark.parametrize(
    ("device", "name", "share"),
    [("cuda", "NVIDIA H200", " (21% of peak)"), ("cuda", "NVIDIA L40S", ""), ("cpu", "", None)],
)
def test_training_says_its_speed(
    device: str, name: str, share: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60000 tokens in 2 s on 2 GPUs, for 13.8 GFLOP each: metrics, TensorBoard and the bar."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: 3.0))
    cfg = Train(model=Path(), data=(), out=tmp_path, seq_len=1000)
    result = loop.StepResult(torch.tensor(2.0), torch.tensor(1.0), torch.ones(1))
    setup: Any = SimpleNamespace(model=shape("llama-3-8b"))
    said: list[str] = []
    bar = SimpleNamespace(set_postfix_str=said.append)
    ranks = Ranks(0, 2, torch.device(device))
    with Metrics(tmp_path) as metrics:
        loop.report(metrics, bar, [loop.Waiting(1, 60000, result)], cfg, 1.0, ranks, setup)
    want = {"tflops": 13.8176 * 15, **({"mfu": 13.8176e9 * 15000 / 9.89e14} if share else {})}
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert row["tokens_per_s"] == 30000
    used = {name: row[name] for name in ("tflops", "mfu") if name in row}
    assert used == pytest.approx(want, rel=1e-5)
    curves = {name: board.Scalars(name)[0].value for name in board.Tags()["scalars"]}
    assert curves.keys() == row.keys() - {"step"}
    assert {name: curves[name] for name in used} == pytest.approx(want, rel=1e-5)
    work = "" if share is None else f", 207.3 TFLOP/s{share}"
    assert said[0].startswith(f"loss 2.0000, 30000 tok/s{work}, ")


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 9.89e14),
        ("NVIDIA H100 PCIe", 7.56e14),
        ("NVIDIA H200 NVL", 8.35e14),
        ("NVIDIA GH200 480GB", 9.89e14),
        ("NVIDIA A100-SXM4-80GB", 3.12e14),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("CPU", None),
    ],
)
def test_the_peak_is_that_of_the_card(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak
