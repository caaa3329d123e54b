"""Models and GPUs by name, for plans that need no files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from usp.models import LlamaConfig, Rope

_LLAMA3 = Rope(rope_type="llama3", factor=8.0, original_max_position=8192)

MODELS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        "smollm2-135m": LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
            num_kv_heads=3, rms_eps=1e-5, rope_theta=100000.0, tie_embeddings=True, max_position=8192,
        ),
        "qwen3-4b": LlamaConfig(
            vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32,
            num_kv_heads=8, head_dim=128, rope_theta=1e6, tie_embeddings=True, qk_norm=True,
            max_position=40960, model_type="qwen3",
        ),
        "qwen3-8b": LlamaConfig(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32,
            num_kv_heads=8, head_dim=128, rope_theta=1e6, qk_norm=True, max_position=40960,
            model_type="qwen3",
        ),
        "llama-3-8b": LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
            num_kv_heads=8, rms_eps=1e-5, rope_theta=500000.0, max_position=8192,
        ),
        "llama-3.1-8b": LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
            num_kv_heads=8, rms_eps=1e-5, rope_theta=500000.0, rope=_LLAMA3, max_position=131072,
        ),
        "llama-3-70b": LlamaConfig(
            vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64,
            num_kv_heads=8, rms_eps=1e-5, rope_theta=500000.0, max_position=8192,
        ),
    }
)  # fmt: skip

GPUS: Mapping[str, int] = MappingProxyType(
    {
        "a100": 80 * 10**9,
        "h100": 80 * 10**9,
        "h200": 141 * 10**9,
        "b200": 180 * 10**9,
    }
)
"""Bytes of memory."""


def find_model(name: str) -> LlamaConfig:
    """A preset, or the configuration in a Hugging Face directory. ValueError when it is neither."""
    from usp.tools.setup import read_model_config

    if name in MODELS:
        return MODELS[name]
    if not Path(name).is_dir():
        raise ValueError(
            f"model={name} must be a Hugging Face model directory or one of {', '.join(MODELS)}. "
            "Correct the name or the path."
        )
    return read_model_config(Path(name))
