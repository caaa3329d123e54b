"""Small random Hugging Face models that the tests of models/ share."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0],
    "original_max_position_embeddings": 32,
}
BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 60,
    "intermediate_size": 84,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
MODELS: dict[str, dict[str, Any]] = {
    "gqa 6/2": {},
    "gqa 9/3 tied": {
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "mha, kv heads not named": {"num_key_value_heads": None},
    "mqa": {"num_key_value_heads": 1},
    "head_dim": {"head_dim": 16},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 3.3}},
    "yarn rope": {"rope_parameters": YARN},
    "yarn rope, all keys": {
        "rope_parameters": {
            **YARN,
            "beta_fast": 3.0,
            "beta_slow": 0.7,
            "mscale": 0.9,
            "mscale_all_dim": 0.4,
            "truncate": False,
        }
    },
    "yarn rope, scale given": {"rope_parameters": {**YARN, "attention_factor": 1.25}},
    "longrope": {"rope_parameters": LONG},
    "longrope, factor given": {"rope_parameters": {**LONG, "factor": 5.0}},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 14},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 tied, yarn rope": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_parameters": YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 14, "attention_bias": True},
}
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral, window": {"model_type": "mistral", "sliding_window": 7},
    "qwen2, upper layers": {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
    },
    "qwen3, layers by name": {
        "model_type": "qwen3",
        "head_dim": 14,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
EVERY = {**MODELS, **WINDOWED}


def hf_model(name: str = "gqa 6/2", *, seed: int = 0, **changes: Any) -> Any:
    """A float32 model with every weight random, large enough for each of them to matter."""
    fields = {**BASE, **EVERY[name], **changes}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.normal_(1.0 if "norm" in key else 0.0, 0.2)
    return model


def load_hf(path: Path) -> tuple[Any, dict[str, Any]]:
    """(model, what did not fit) as Transformers loads the directory."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    return loaded


def save_hf(model: Any, path: Path, *, max_shard_size: str = "50GB") -> Path:
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path
