"""Rotary positions in Hugging Face's half-split order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from usp.models.config import LlamaConfig


def inverse_frequencies(cfg: LlamaConfig, *, device: torch.device | str = "cpu") -> Tensor:
    """[H/2] float32, radians per token. Computed as Transformers computes it, operation by operation."""
    exponent = torch.arange(0, cfg.head_dim, 2, dtype=torch.int64, device=device).float() / cfg.head_dim
    freq = 1.0 / (cfg.rope_theta**exponent)
    if cfg.rope.rope_type == "linear":
        return freq / cfg.rope.factor
    if cfg.rope.rope_type == "llama3":
        return _llama3(freq, cfg)
    assert cfg.rope.rope_type == "default", cfg.rope
    return freq


def _llama3(freq: Tensor, cfg: LlamaConfig) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, a smooth band between them."""
    rope = cfg.rope
    long_wave = rope.original_max_position / rope.low_freq_factor
    short_wave = rope.original_max_position / rope.high_freq_factor
    wave = 2 * math.pi / freq
    scaled = torch.where(wave > long_wave, freq / rope.factor, freq)
    smooth = (rope.original_max_position / wave - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    in_band = (wave >= short_wave) & (wave <= long_wave)
    return torch.where(in_band, blended, scaled)


def rope_cos_sin(positions: Tensor, cfg: LlamaConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """positions [B, S] -> cos, sin [B, S, 1, H] in `dtype`.

    Angles are float32 whatever the dtype: that rounding is part of how these models were trained.
    """
    angle = positions[..., None].float() * inverse_frequencies(cfg, device=positions.device)
    angle = torch.cat((angle, angle), dim=-1)[..., None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rope(x_BSNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its token's position; x and result [B, S, N, H] or [B, S, K, H]."""
    first, second = x_BSNH.chunk(2, dim=-1)
    return x_BSNH * cos + torch.cat((-second, first), dim=-1) * sin
