"""config.json of Transformers 4 and 5, read into and written from the fields of LlamaConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from usp.models.files.hf_rope import read_rope, write_rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
_MAX_POSITION = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # what Transformers assumes when the key is absent
_FULL, _SLIDING = "full_attention", "sliding_attention"

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
_NOT_ZERO = ("num_key_value_heads", "head_dim")  # null and absent mean a default, 0 does not
_HINT = {
    "attention_dropout": "Set it to 0.0",
    "quantization_config": "De-quantize the checkpoint, or remove the field if its tensors are plain already",
}


def read(config: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """(fields of LlamaConfig with `rope` as fields of Rope, problems). No fields when sizes are missing."""
    family = config.get("model_type")
    if family not in FAMILIES:
        return None, [f"model_type={family!r} must be one of {list(FAMILIES)}. Choose another checkpoint"]
    problems = [f"{key} is missing" for key in _REQUIRED if config.get(key) is None]
    usable = not problems
    problems += _refused(config)
    theta, rope = read_rope(config, problems)
    windows = _windows(config, family, problems)
    values = _Values(config, problems)
    attention_bias = values.flag("attention_bias") and family in ("llama", "qwen3")
    heads, default_kv = config.get("num_attention_heads"), _KV_HEADS.get(family)
    kv_heads = config.get("num_key_value_heads", default_kv)
    fields = {name: config.get(key) for key, name in _REQUIRED.items()}
    fields.update(
        model_type=family,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=config.get("head_dim") or (128 if family == "qwen3" else 0),  # 0: hidden_size / num_heads
        rms_eps=values.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope=rope,
        tie_embeddings=values.flag("tie_word_embeddings"),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=values.flag("mlp_bias") and family == "llama",
        qk_norm=family == "qwen3",
        windows=windows,
        max_position=config.get("max_position_embeddings", _MAX_POSITION[family]),
        init_std=values.number("initializer_range", 0.02),
    )
    return fields if usable else None, problems


class _Values:
    """Typed reading; a value of another type becomes a problem and the default."""

    def __init__(self, config: Mapping[str, Any], problems: list[str]) -> None:
        self.config, self.problems = config, problems

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key, default)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{key}={value!r} must be true or false")
        return value is True

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e30:
            self.problems.append(f"{key}={value!r} must be a number of 0 or more")
            return default
        return float(value)


def _refused(config: Mapping[str, Any]) -> list[str]:
    problems = [
        f"{key}={config[key]!r} is not supported. {_HINT.get(key, 'Choose another checkpoint')}"
        for key in _REFUSED
        if config.get(key)
    ]
    if not config.get("is_causal", True):  # null too: Transformers asks whether it is true
        problems.append(
            f"is_causal={config['is_causal']!r} must be true or absent, as every query would see the tokens "
            "after it. Choose another checkpoint"
        )
    problems += [
        f"{key}={config[key]!r} must be a positive integer, or absent for the default"
        for key in _NOT_ZERO
        if config.get(key) is not None and not config[key]
    ]
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        problems.append(f"hidden_act={act!r} must be 'silu'")
    if "AutoModelForCausalLM" in str(config.get("auto_map") or ""):
        problems.append("auto_map names a model class of the checkpoint's own, which is never run")
    return problems


def _windows(config: Mapping[str, Any], family: str, problems: list[str]) -> tuple[int | None, ...]:
    """For each layer the window that Transformers applies; () where no layer has one."""
    layers = config.get("num_hidden_layers")
    if family == "llama" or not isinstance(layers, int) or not 0 < layers <= 10_000:
        return ()
    window = config.get("sliding_window", 4096)  # an absent key means 4096, null full attention
    if family != "mistral" and not _Values(config, problems).flag("use_sliding_window"):
        window = None
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        problems.append(f"sliding_window={window!r} must be a positive integer or null")
        return ()
    types = config.get("layer_types")
    if types is None:
        first = 0 if family == "mistral" else config.get("max_window_layers", 28)
        if not isinstance(first, int):
            problems.append(f"max_window_layers={first!r} must be an integer")
            return ()
        return tuple(window if layer >= first else None for layer in range(layers))
    return _by_type(types, window, layers, family, problems)


def _by_type(
    types: Any, window: int | None, layers: int, family: str, problems: list[str]
) -> tuple[int | None, ...]:
    if not isinstance(types, list) or len(types) != layers:
        problems.append(f"layer_types must name one type for each of the {layers} layers")
        return ()
    if odd := sorted({repr(kind) for kind in types if kind not in (_FULL, _SLIDING)}):
        problems.append(f"layer_types={', '.join(odd)} must be {_FULL!r} or {_SLIDING!r}")
    elif _SLIDING in types and window is None:
        problems.append(
            "layer_types holds 'sliding_attention' but no sliding_window applies. "
            "Set sliding_window and use_sliding_window"
        )
    elif family == "mistral" and set(types) != {_FULL if window is None else _SLIDING}:
        problems.append(
            f"layer_types must agree with sliding_window={window} for mistral, whose layers are all alike"
        )
    return tuple(window if kind == _SLIDING else None for kind in types)


def write(fields: Mapping[str, Any], *, dtype: str) -> dict[str, Any]:
    """Inverse of `read`, in both generations' spelling. ValueError if the family cannot say it."""
    family: str = fields["model_type"]
    _check_family(fields)
    rope = write_rope(fields["rope"])
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
        rope_scaling=None if rope["rope_type"] == "default" else rope,
        rope_parameters={**rope, "rope_theta": fields["rope_theta"]},
        dtype=dtype,
        torch_dtype=dtype,
    )
    if family in ("llama", "qwen3"):
        out["attention_bias"] = fields["qkv_bias"]
    if family == "llama":
        out["mlp_bias"] = fields["mlp_bias"]
    else:
        out.update(_write_windows(fields, family))
    return out


def _write_windows(fields: Mapping[str, Any], family: str) -> dict[str, Any]:
    windows = fields["windows"] or (None,) * fields["num_layers"]
    size = next((window for window in windows if window is not None), None)
    if family == "mistral":
        return {"sliding_window": size}
    first = next((i for i, window in enumerate(windows) if window is not None), len(windows))
    return {
        "sliding_window": size,
        "use_sliding_window": size is not None,
        "max_window_layers": first,  # read by versions that do not know layer_types
        "layer_types": [_FULL if window is None else _SLIDING for window in windows],
    }


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
    sizes = set(fields["windows"])
    if family == "llama" or (family == "mistral" and len(sizes) > 1) or len(sizes - {None}) > 1:
        rules["windows"] = ()
    for name, wanted in rules.items():
        if fields[name] != wanted:
            raise ValueError(
                f"{name}={fields[name]} must be {wanted} to be written, got model_type={family!r}. "
                "Choose the model_type that has it."
            )
    if family == "llama" and fields["hidden_size"] % fields["num_heads"]:
        raise ValueError(
            f"hidden_size={fields['hidden_size']} must be a multiple of num_heads to be written, got "
            f"num_heads={fields['num_heads']} and model_type='llama', which Transformers refuses. "
            "Choose another model_type."
        )
