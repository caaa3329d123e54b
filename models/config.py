"""Configuration of the Llama family: plain numbers, no mesh, no dtype."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from usp.models.files import hf_config, hf_rope

_MOST_LAYERS = 10_000  # a damaged file must not make a tree that fills the memory


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary frequencies; a field that `rope_type` has no use for keeps its default.

    default: none. linear, dynamic: factor. llama3: factor, both bounds, original_max_position. yarn: factor,
    original_max_position, beta_*, mscale*, truncate, attention_factor. longrope: short_factor and long_factor
    (head_dim / 2 numbers each), original_max_position, factor, attention_factor. `factor` None, for yarn and
    longrope: max_position / original_max_position. None elsewhere: what the papers propose.
    """

    rope_type: str = "default"
    factor: float | None = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.rope_type not in hf_rope.TYPES:
            raise ValueError(
                f"rope_type={self.rope_type!r} must be one of {sorted(hf_rope.TYPES)}. "
                "This type is not supported yet: choose another checkpoint."
            )
        if problems := list(self._problems()):
            raise ValueError(f"rope of rope_type={self.rope_type} must be usable: {'; '.join(problems)}.")

    def _problems(self) -> list[str]:
        problems = [
            f"{name}={value!r} must be a positive number"
            for name in ("factor", "attention_factor", "beta_fast", "beta_slow", "original_max_position")
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf
        ]
        if self.factor is None and self.rope_type not in ("yarn", "longrope"):
            problems.append("factor is missing")
        if self.rope_type == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            problems.append(
                f"low_freq_factor={self.low_freq_factor} must be positive and smaller than the other bound, "
                f"got high_freq_factor={self.high_freq_factor}. Swap or correct them"
            )
        if self.rope_type == "longrope":
            problems += [
                f"{name} must hold positive numbers"
                for name in ("short_factor", "long_factor")
                if not all(0 < value < math.inf for value in getattr(self, name))
            ]
            if self.original_max_position == 1:
                problems.append("original_max_position=1 must be at least 2")
        return problems

    @property
    def needs_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return self.rope_type in ("dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Llama 2/3.x, Mistral, Qwen2, Qwen3 and SmolLM, told apart by these fields alone.

    `num_kv_heads` and `head_dim` default to what Hugging Face derives: as many as query heads, and
    hidden_size / num_heads. `windows`: for each layer how many keys a query sees, itself included, None for
    all of them; empty: all layers see all. `model_type` only names the family to write to config.json.
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
    windows: tuple[int | None, ...] = ()
    max_position: int = 2048
    init_std: float = 0.02
    model_type: str = "llama"

    def __post_init__(self) -> None:
        problems = self._size_problems()
        if not problems:
            if not self.num_kv_heads:
                object.__setattr__(self, "num_kv_heads", self.num_heads)
            if not self.head_dim and self.hidden_size % self.num_heads == 0:
                object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
            full = all(window is None for window in self.windows)
            object.__setattr__(self, "windows", () if full else tuple(self.windows))
            problems = [*self._head_problems(), *self._rope_problems(), *self._window_problems()]
        if problems:
            raise ValueError(f"{'; '.join(problems)}.")

    def _size_problems(self) -> list[str]:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "max_position")
        derived = ("num_kv_heads", "head_dim")  # 0: from the others
        problems = [
            f"{name}={value!r} must be a positive integer. Correct {name}"
            for name in (*sizes, *derived)
            if not is_count(value := getattr(self, name)) and not (name in derived and value == 0)
        ]
        if not problems and self.num_layers > _MOST_LAYERS:
            problems.append(
                f"num_layers={self.num_layers} must be at most {_MOST_LAYERS}. Correct num_layers"
            )
        return problems

    def _head_problems(self) -> list[str]:
        if not self.head_dim:
            return [
                f"hidden_size={self.hidden_size} must be a multiple of the heads when head_dim is not "
                f"given, got num_heads={self.num_heads}. Give head_dim"
            ]
        problems = []
        if self.num_heads % self.num_kv_heads:
            problems.append(
                f"num_kv_heads={self.num_kv_heads} must divide the query heads, "
                f"got num_heads={self.num_heads}. Change one of the two"
            )
        if self.head_dim % 2:
            problems.append(
                f"head_dim={self.head_dim} must be even for rotary positions, got num_heads={self.num_heads}."
                " Change head_dim"
            )
        return problems

    def _rope_problems(self) -> list[str]:
        rope, half = self.rope, self.head_dim // 2
        problems = []
        if not 0 < self.rope_theta < math.inf or (rope.rope_type == "yarn" and self.rope_theta <= 1):
            problems.append(f"rope_theta={self.rope_theta} must be a positive number, above 1 for yarn")
        if rope.rope_type == "dynamic" and half == 1:
            problems.append("head_dim=2 must be larger for rope_type=dynamic")
        if rope.rope_type == "longrope":
            problems += [
                f"{name} must hold head_dim / 2 numbers, got {len(given)} for head_dim={self.head_dim}"
                for name in ("short_factor", "long_factor")
                if len(given := getattr(rope, name)) != half
            ]
        return problems

    def _window_problems(self) -> list[str]:
        problems = []
        if self.windows and len(self.windows) != self.num_layers:
            problems.append(
                f"windows must have one entry a layer, got {len(self.windows)} and "
                f"num_layers={self.num_layers}"
            )
        if odd := sorted({repr(w) for w in self.windows if w is not None and not is_count(w)}):
            problems.append(f"windows must be positive integers or None, got {', '.join(odd)}")
        return problems

    def window_of(self, layer: int) -> int | None:
        """How many keys a query of this layer sees, itself included; None: all before it."""
        return self.windows[layer] if self.windows else None

    def with_layers(self, num: int) -> LlamaConfig:
        """The same with `num` layers; a pattern of windows is cut, or starts again, in its order."""
        again = (self.window_of(i % self.num_layers) for i in range(num))
        return dataclasses.replace(self, num_layers=num, windows=tuple(again) if self.windows else ())

    @classmethod
    def from_hf_dict(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read a config.json of Transformers 4 or 5 (llama, mistral, qwen2, qwen3).

        Raises one ValueError that names every field that is missing, has a wrong type, or changes the result
        and is not supported.
        """
        fields, problems = hf_config.read(config)
        cfg = None
        if fields is not None:
            try:
                cfg = cls(**{**fields, "rope": Rope(**fields["rope"])})
            except ValueError as error:
                problems.append(str(error).rstrip("."))
        if cfg is None or problems:
            family = config.get("model_type")
            raise ValueError(
                f"config.json of model_type={family} must be a supported one: {'; '.join(problems)}."
            )
        return cfg

    def to_hf_dict(self, *, dtype: str = "float32") -> dict[str, Any]:
        """config.json that Transformers 4 and 5 read alike; `dtype` as in "bfloat16"."""
        return hf_config.write(dataclasses.asdict(self), dtype=dtype)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Inverse of `to_dict`. Raises ValueError for unknown or missing names and wrong types."""
        try:
            return cls(**{**config, "rope": Rope(**config.get("rope", {}))})
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"config={sorted(config)} must hold the fields of LlamaConfig: {error}."
            ) from error


def is_count(value: object) -> bool:
    """Whether it is a whole number of at least 1 that a size can be."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31
