"""The models that are measured, the work one token takes, and the rate that a device could do it at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from usp.models import LlamaConfig
from usp.tools.bench.job import Row
from usp.tools.presets import find_model

MOST_LAYERS = 8
TINY = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
    max_position=8192,
)  # fmt: skip

PEAKS: Mapping[str, float] = MappingProxyType(
    {"GB200": 2.5e15, "B200": 2.25e15, "GH200": 9.89e14, "H200": 9.89e14, "H100": 9.89e14, "A100": 3.12e14}
)
"""Dense bfloat16 FLOP/s of the data sheets, by a part of the device's name (SXM)."""


def shape(model: str, layers: int | None = None) -> LlamaConfig:
    """The model by name or directory, with so many layers (default: its own, `MOST_LAYERS` at most)."""
    cfg = TINY if model == "tiny" else find_model(model)
    return replace(cfg, num_layers=layers or min(cfg.num_layers, MOST_LAYERS))


def weights(cfg: LlamaConfig) -> tuple[int, int]:
    """Matrix entries that a token is multiplied with: of one layer, and of the head."""
    d, f, h = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    return d * h * (2 * cfg.num_heads + 2 * cfg.num_kv_heads) + 3 * d * f, cfg.vocab_size * d


def flops_per_token(cfg: LlamaConfig, seq_len: int) -> float:
    """6 N + 6 L H d S, forward and backward: causal, nothing that is computed again, N without the input
    embedding; L layers of H heads of size d, one document of S tokens a row."""
    layer, head = weights(cfg)
    return 6 * (cfg.num_layers * layer + head) + 6 * cfg.num_layers * cfg.num_heads * cfg.head_dim * seq_len


def peak_flops(device: str) -> float | None:
    """None for a device that `PEAKS` does not know, such as a CPU."""
    return next((peak for part, peak in PEAKS.items() if part in device), None)


def guess_seconds(cfg: LlamaConfig, seq_len: int, processes: int, device: str) -> float:
    """What one step on GPUs of today may take, to plan how often it is repeated; 0 on a CPU."""
    return 0.0 if device == "cpu" else flops_per_token(cfg, seq_len) * seq_len / processes / 4.2e14


def figures(row: Row, cfg: LlamaConfig) -> Row:
    """A measured row with what follows from its seconds and its peak."""
    seq_len, world = row["seq_len"], row["world"]
    tokens = seq_len / world / row["seconds"]
    found = {"tokens_per_s_gpu": tokens, "tflops_gpu": flops_per_token(cfg, seq_len) * tokens / 1e12}
    if row.get("peak") is not None:
        found["kib_per_local_token"] = (row["peak"] - row["base"]) / 1024 / (seq_len / world)
    return {**row, **found}
