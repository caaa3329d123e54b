"""Rotary positions in Hugging Face's half-split order.

Frequencies are computed as Transformers computes them, operation by operation, so that they agree bit by bit.
What is known from the configuration alone is computed on the host, which does not wait for a GPU to have it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from usp.host import sent
from usp.models.config import LlamaConfig

_BETA_FAST, _BETA_SLOW = 32, 1  # proposed in the YaRN paper, used where a config names none


def inverse_frequencies(
    cfg: LlamaConfig, *, seq_len: int | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """[H/2] float32, radians per token. `seq_len`: the global length, for the types that depend on it."""
    rope, theta, device = cfg.rope, cfg.rope_theta, torch.device(device)
    exponent = torch.arange(0, cfg.head_dim, 2, dtype=torch.int64, device=device).float() / cfg.head_dim
    if rope.rope_type == "default":
        return 1.0 / (theta**exponent)
    if rope.rope_type == "linear":
        return 1.0 / (theta**exponent) / _factor(cfg)
    if rope.rope_type == "llama3":
        return _llama3(1.0 / (theta**exponent), cfg)
    if rope.rope_type == "yarn":
        return _yarn(theta**exponent, cfg)
    if seq_len is None:
        raise ValueError(
            f"seq_len=None must be the length of the whole sequence, the same on every rank, got "
            f"rope_type={rope.rope_type}, whose frequencies depend on it. Pass seq_len."
        )
    if rope.rope_type == "dynamic":
        return 1.0 / (_dynamic_base(cfg, seq_len) ** exponent)
    assert rope.rope_type == "longrope", rope
    factors = rope.long_factor if seq_len > rope.original_max_position else rope.short_factor
    return 1.0 / (sent(torch.tensor(factors, dtype=torch.float32), device) * theta**exponent)


def _dynamic_base(cfg: LlamaConfig, seq_len: int) -> float | Tensor:
    """NTK by parts of the length: beyond max_position the base grows with it. In float32, as there."""
    if seq_len <= cfg.max_position:
        return cfg.rope_theta
    factor, dim = _factor(cfg), cfg.head_dim
    grown = (factor * torch.tensor(seq_len) / cfg.max_position) - (factor - 1)
    base: Tensor = cfg.rope_theta * grown ** (dim / (dim - 2))
    return base


def _llama3(freq: Tensor, cfg: LlamaConfig) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, a smooth band between them."""
    rope, factor = cfg.rope, _factor(cfg)
    long_wave = rope.original_max_position / rope.low_freq_factor
    short_wave = rope.original_max_position / rope.high_freq_factor
    wave = 2 * math.pi / freq
    scaled = torch.where(wave > long_wave, freq / factor, freq)
    smooth = (rope.original_max_position / wave - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    in_band = (wave >= short_wave) & (wave <= long_wave)
    return torch.where(in_band, blended, scaled)


def _yarn(powers: Tensor, cfg: LlamaConfig) -> Tensor:
    """YaRN (Peng et al. 2023): dimensions that turn often are kept, those that turn rarely interpolated."""
    rope, dim, half = cfg.rope, cfg.head_dim, cfg.head_dim // 2

    def dim_of(turns: float) -> float:  # the dimension that turns so often over the original length
        return (dim * math.log(rope.original_max_position / (turns * 2 * math.pi))) / (
            2 * math.log(cfg.rope_theta)
        )

    low, high = dim_of(rope.beta_fast or _BETA_FAST), dim_of(rope.beta_slow or _BETA_SLOW)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - sent(ramp, powers.device)
    return 1.0 / (_factor(cfg) * powers) * (1 - kept) + 1.0 / powers * kept


def _factor(cfg: LlamaConfig) -> float:
    """How many times the original length."""
    if cfg.rope.factor is None:
        return cfg.max_position / cfg.rope.original_max_position
    return cfg.rope.factor


def attention_scale(cfg: LlamaConfig) -> float:
    """What yarn and longrope multiply cos and sin by; 1 for the others."""
    rope = cfg.rope
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = _factor(cfg)
    if factor <= 1:
        return 1.0
    if rope.rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(rope.original_max_position))
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(factor, rope.mscale) / _yarn_scale(factor, rope.mscale_all_dim)
    return _yarn_scale(factor, 1)


def _yarn_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def rope_cos_sin(
    positions: Tensor, cfg: LlamaConfig, dtype: torch.dtype, *, seq_len: int | None = None
) -> tuple[Tensor, Tensor]:
    """positions [B, S] -> cos, sin [B, S, 1, H] in `dtype`.

    `seq_len`: tokens of a row of the whole batch without padding, never of one rank's shard; only dynamic and
    longrope need it, and raise ValueError without. Angles are float32 whatever the dtype: that rounding is
    part of how these models were trained.
    """
    if positions.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"positions={positions.dtype} must be whole numbers, int64 or int32. Take what shard_batch made."
        )
    angle = positions[..., None].float() * inverse_frequencies(cfg, seq_len=seq_len, device=positions.device)
    angle = torch.cat((angle, angle), dim=-1)[..., None, :]
    scale = attention_scale(cfg)
    return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)


def rope(x_BSNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its token's position; x and result [B, S, N, H] or [B, S, K, H]."""
    first, second = x_BSNH.chunk(2, dim=-1)
    return x_BSNH * cos + torch.cat((-second, first), dim=-1) * sin
