"""config.json of Transformers 4 and 5, read into and written from the fields of LlamaConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

# Parameters of each supported rotary type: name in config.json -> field of Rope.
ROPE_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_position",
    },
}
_ROPE_NEUTRAL = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}

_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
_MAX_POSITION = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # what Transformers assumes when the key is absent

# Fields that change the result when they are set, whatever the family.
_REFUSED = (
    "attention_dropout",
    "attn_logit_softcapping",
    "attention_multiplier",
    "clip_qkv",
    "embedding_multiplier",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "no_rope_layers",
    "num_experts",
    "num_local_experts",
    "quantization_config",
    "residual_multiplier",
    "rope_interleaved",
    "use_bidirectional_attention",
)
_HINT = {
    "attention_dropout": "Set it to 0.0",
    "quantization_config": "De-quantize the checkpoint, or remove the field if its tensors are plain already",
}


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of LlamaConfig (`rope` as a dict of the fields of Rope). One ValueError names every problem."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type={family!r} must be one of {list(FAMILIES)}. Choose another checkpoint.")
    problems = [f"{key} is missing" for key in _REQUIRED if config.get(key) is None]
    problems += _refused(config, family)
    theta, rope = _read_rope(config, problems)
    if problems:
        raise ValueError(
            f"config.json of model_type={family} must be a supported one: {'; '.join(problems)}."
        )

    attention_bias = bool(config.get("attention_bias", False)) and family in ("llama", "qwen3")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", _KV_HEADS.get(family))
    fields = {name: config[key] for key, name in _REQUIRED.items()}
    fields.update(
        model_type=family,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=_head_dim(config, family),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        rope=rope,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        max_position=config.get("max_position_embeddings", _MAX_POSITION[family]),
        init_std=float(config.get("initializer_range", 0.02)),
    )
    return fields


def _head_dim(config: Mapping[str, Any], family: str) -> int:
    if family == "qwen3":
        return config.get("head_dim") or 128
    return config.get("head_dim") or 0  # 0: hidden_size / num_heads


def _refused(config: Mapping[str, Any], family: str) -> list[str]:
    problems = [
        f"{key}={config[key]!r} is not supported. {_HINT.get(key, 'Choose another checkpoint')}"
        for key in _REFUSED
        if config.get(key)
    ]
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        problems.append(f"hidden_act={act!r} must be 'silu'")
    if "AutoModelForCausalLM" in (config.get("auto_map") or {}):
        problems.append("auto_map names a model class of the checkpoint's own, which is never run")
    window = _window(config, family)
    if window:
        problems.append(
            f"sliding_window={window} is not supported. "
            "Set it to null only if the model was trained with full attention"
        )
    return problems


def _window(config: Mapping[str, Any], family: str) -> Any:
    """The sliding window that Transformers would apply to at least one layer, or None."""
    if family == "llama":
        return None
    if family == "mistral":
        return config.get("sliding_window", 4096)  # an absent key means 4096 there, null means full attention
    layer_types = config.get("layer_types")
    if layer_types is not None:
        odd = sorted(set(layer_types) - {"full_attention"})
        return f"layer_types {odd}" if odd else None
    windowed = config.get("num_hidden_layers", 0) > config.get("max_window_layers", 28)
    return config.get("sliding_window", 4096) if config.get("use_sliding_window") and windowed else None


def _read_rope(config: Mapping[str, Any], problems: list[str]) -> tuple[float, dict[str, Any]]:
    """Same precedence as Transformers 5: a non-empty rope_scaling replaces rope_parameters."""
    raw = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = raw.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = raw.get("rope_type") or raw.get("type") or "default"
    partial = raw.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        problems.append(f"partial_rotary_factor={partial} must be 1.0")
    nested = sorted(key for key, value in raw.items() if isinstance(value, Mapping))
    if nested:
        problems.append(f"rope_parameters={nested} differ by layer type, which is not supported")
        return theta, {}
    if kind not in ROPE_KEYS:
        problems.append(f"rope_type={kind!r} must be one of {sorted(ROPE_KEYS)}")
        return theta, {}
    if kind == "llama3" and config.get("original_max_position_embeddings") is not None:
        raw["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    keys = ROPE_KEYS[kind]
    unknown = sorted(k for k, v in raw.items() if v is not None and k not in keys and k not in _ROPE_NEUTRAL)
    problems += [f"rope_parameters.{key}={raw[key]!r} has no meaning for rope_type={kind}" for key in unknown]
    problems += [
        f"rope_parameters.{key} is missing for rope_type={kind}" for key in keys if raw.get(key) is None
    ]
    return theta, {
        "rope_type": kind,
        **{field: raw[key] for key, field in keys.items() if raw.get(key) is not None},
    }


def write(fields: Mapping[str, Any], *, dtype: str) -> dict[str, Any]:
    """Inverse of `read`, in both generations' spelling. ValueError if the family cannot say it."""
    family: str = fields["model_type"]
    _check_family(fields)
    kind = fields["rope"]["rope_type"]
    rope = {"rope_type": kind, **{key: fields["rope"][field] for key, field in ROPE_KEYS[kind].items()}}
    out: dict[str, Any] = {key: fields[name] for key, name in _REQUIRED.items()}
    out.update(
        architectures=[f"{family.title()}ForCausalLM"],
        model_type=family,
        num_key_value_heads=fields["num_kv_heads"],
        head_dim=fields["head_dim"],
        hidden_act="silu",
        rms_norm_eps=fields["rms_eps"],
        max_position_embeddings=fields["max_position"],
        initializer_range=fields["init_std"],
        tie_word_embeddings=fields["tie_embeddings"],
        attention_dropout=0.0,
        rope_theta=fields["rope_theta"],
        rope_scaling=None if kind == "default" else rope,
        rope_parameters={**rope, "rope_theta": fields["rope_theta"]},
        dtype=dtype,
        torch_dtype=dtype,
    )
    if family in ("llama", "qwen3"):
        out["attention_bias"] = fields["qkv_bias"]
    if family == "llama":
        out["mlp_bias"] = fields["mlp_bias"]
    else:
        out["sliding_window"] = None
    if family in ("qwen2", "qwen3"):
        out.update(use_sliding_window=False, layer_types=["full_attention"] * fields["num_layers"])
    return out


def _check_family(fields: Mapping[str, Any]) -> None:
    family: str = fields["model_type"]
    if family not in FAMILIES:
        raise ValueError(f"model_type={family!r} must be one of {list(FAMILIES)}. Change model_type.")
    free_bias = family in ("llama", "qwen3")
    rules = {
        "o_bias": fields["qkv_bias"] if free_bias else False,
        "mlp_bias": fields["mlp_bias"] if family == "llama" else False,
        "qk_norm": family == "qwen3",
        "qkv_bias": fields["qkv_bias"] if free_bias else family == "qwen2",
    }
    for name, wanted in rules.items():
        if fields[name] != wanted:
            raise ValueError(
                f"{name}={fields[name]} must be {wanted} to be written, got model_type={family!r}. "
                "Choose the model_type that has it."
            )
    derived = fields["head_dim"] * fields["num_heads"] == fields["hidden_size"]
    if family == "qwen2" and not derived:
        raise ValueError(
            f"head_dim={fields['head_dim']} must be hidden_size / num_heads, got model_type='qwen2'. "
            "Choose the model_type that has head_dim."
        )
