"""Configuration of the Llama family: plain numbers, no mesh, no dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from usp.models import hf_config


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary frequencies. `rope_type`: "default", "linear" (factor) or "llama3" (all fields)."""

    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in hf_config.ROPE_KEYS:
            raise ValueError(
                f"rope_type={self.rope_type!r} must be one of {sorted(hf_config.ROPE_KEYS)}. "
                "This type is not supported yet: choose another checkpoint."
            )
        if self.factor <= 0:
            raise ValueError(f"factor={self.factor} must be positive, got rope_type={self.rope_type}.")
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be smaller than the other bound, "
                f"got high_freq_factor={self.high_freq_factor}. Swap or correct them."
            )


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Llama 2/3.x, Mistral, Qwen2 and Qwen3, told apart by these fields alone.

    `num_kv_heads` and `head_dim` default to what Hugging Face derives: as many as query heads, and
    hidden_size / num_heads. `model_type` only names the family to write to config.json.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope: Rope = field(default_factory=Rope)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_position: int = 2048
    init_std: float = 0.02
    model_type: str = "llama"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "max_position")
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer. Correct {name}.")
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if not self.head_dim:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} must be a multiple of the heads when head_dim is not "
                    f"given, got num_heads={self.num_heads}. Give head_dim."
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.num_kv_heads < 0 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide the query heads, "
                f"got num_heads={self.num_heads}. Change one of the two."
            )
        if self.head_dim < 0 or self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} must be even for rotary positions, got num_heads={self.num_heads}."
                " Change head_dim."
            )

    @classmethod
    def from_hf_dict(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read a config.json of Transformers 4 or 5 (llama, mistral, qwen2, qwen3).

        Raises one ValueError that names every field that is missing, or that changes the result and is
        not supported.
        """
        fields = hf_config.read(config)
        rope = Rope(**fields.pop("rope"))
        return cls(rope=rope, **fields)

    def to_hf_dict(self, *, dtype: str = "float32") -> dict[str, Any]:
        """config.json that Transformers 4 and 5 read alike; `dtype` as in "bfloat16"."""
        return hf_config.write(dataclasses.asdict(self), dtype=dtype)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Inverse of `to_dict`. Raises ValueError for unknown or missing names."""
        try:
            return cls(**{**config, "rope": Rope(**config.get("rope", {}))})
        except TypeError as error:
            raise ValueError(
                f"config={sorted(config)} must hold the fields of LlamaConfig: {error}."
            ) from error
