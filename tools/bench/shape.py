"""The models that are measured, and what follows from the seconds of a step."""

from __future__ import annotations

from dataclasses import replace

from usp.models import LlamaConfig
from usp.tools.bench.job import Row
from usp.tools.flops import flops_per_token
from usp.tools.presets import find_model

MOST_LAYERS = 8
TINY = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
    max_position=8192,
)  # fmt: skip


def whole(model: str) -> LlamaConfig:
    """The model by name or directory, with all of its layers."""
    return TINY if model == "tiny" else find_model(model)


def shape(model: str, layers: int | None = None, window: int | None = None) -> LlamaConfig:
    """`whole` with so many layers (default: its own, `MOST_LAYERS` at most), whose windows follow one another
    as the model's own do, or are all `window`."""
    cfg = whole(model)
    cfg = cfg.with_layers(layers or min(cfg.num_layers, MOST_LAYERS))
    return cfg if window is None else replace(cfg, windows=(window,) * cfg.num_layers)


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
