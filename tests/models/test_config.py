"""config.json of both generations, and what is refused by name."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.tiny import BASE, LLAMA3, MODELS
from usp.models import LlamaConfig, Rope
from usp.models.rope import inverse_frequencies

# As published with Llama 3.2 1B, in the older spelling.
V4 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def v5(config: dict[str, Any]) -> dict[str, Any]:
    out = dict(config)
    rope = out.pop("rope_scaling", None) or {"rope_type": "default"}
    return {
        **out,
        "rope_parameters": {**rope, "rope_theta": out.pop("rope_theta")},
        "dtype": out.pop("torch_dtype"),
    }


def test_both_generations_read_alike() -> None:
    cfg = LlamaConfig.from_hf_dict(V4)
    assert cfg == LlamaConfig.from_hf_dict(v5(V4))
    assert cfg.rope == Rope(rope_type="llama3", factor=32.0, original_max_position=8192)
    assert (cfg.rope_theta, cfg.head_dim, cfg.num_kv_heads, cfg.tie_embeddings) == (500000.0, 64, 8, True)


def test_older_key_of_the_rope_type_and_precedence() -> None:
    linear = {**V4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert LlamaConfig.from_hf_dict(linear).rope == Rope(rope_type="linear", factor=2.0)
    both = {**linear, "rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}
    assert (
        LlamaConfig.from_hf_dict(both).rope_theta == 500000.0
    )  # rope_scaling replaces rope_parameters whole
    plain = {k: v for k, v in V4.items() if k not in ("rope_scaling", "rope_theta")}
    assert LlamaConfig.from_hf_dict(plain).rope_theta == 10000.0


@pytest.mark.parametrize("name", MODELS)
def test_write_then_read_is_the_same(name: str) -> None:
    hf = AutoConfig.for_model(**{**BASE, **MODELS[name]})
    cfg = LlamaConfig.from_hf_dict(hf.to_dict())
    written = cfg.to_hf_dict(dtype="bfloat16")
    assert LlamaConfig.from_hf_dict(written) == cfg
    assert LlamaConfig.from_dict(cfg.to_dict()) == cfg
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    # A reader of the older generation looks at these two alone.
    older = {k: v for k, v in written.items() if k not in ("rope_parameters", "dtype")}
    assert LlamaConfig.from_hf_dict(older) == cfg
    assert AutoConfig.for_model(**written).rope_parameters == hf.rope_parameters


@pytest.mark.parametrize(
    "rope", [{"rope_type": "linear", "factor": 3.0, "rope_theta": 77.0}, LLAMA3, V4["rope_scaling"]]
)
def test_frequencies_equal_transformers(rope: dict[str, Any]) -> None:
    hf = AutoConfig.for_model(**{**BASE, "head_dim": 64, "rope_parameters": {"rope_theta": 10000.0, **rope}})
    cfg = LlamaConfig.from_hf_dict(hf.to_dict())
    want, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf)
    assert scale == 1.0
    assert torch.equal(inverse_frequencies(cfg), want)  # same operations, same bits


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other family": ({"model_type": "gemma2"}, "model_type='gemma2'"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "own code": ({"auto_map": {"AutoModelForCausalLM": "m.Model"}}, "auto_map"),
    "soft cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    "interleaved rope": ({"rope_interleaved": True}, "rope_interleaved"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type='dynamic'"),
    "rope per layer type": ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    "unknown rope key": ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 2.0}}, "mscale=2.0"),
    "no factor": ({"rope_scaling": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
    "llama3 without its original length": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
        "original_max_position_embeddings is missing",
    ),
    "mistral's window": ({"model_type": "mistral", "sliding_window": 512}, "sliding_window=512"),
    "mistral's default window": ({"model_type": "mistral"}, "sliding_window=4096"),
    "qwen2's window": (
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4, "sliding_window": 99},
        "sliding_window=99",
    ),
    "qwen3's layer types": (
        {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 16},
        "sliding_attention",
    ),
    "kv heads": ({"num_key_value_heads": 7}, "num_kv_heads=7"),
    "odd head_dim": ({"head_dim": 63}, "head_dim=63"),
    "no layers": ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    "size as text": ({"vocab_size": "128256"}, "vocab_size='128256'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    changes, named = REFUSED[case]
    with pytest.raises(ValueError, match=r".") as error:
        LlamaConfig.from_hf_dict({**V4, **changes})
    assert named in str(error.value)


def test_all_problems_in_one_error() -> None:
    with pytest.raises(ValueError, match=r"vocab_size is missing.*hidden_act='gelu'.*rope_type='yarn'"):
        LlamaConfig.from_hf_dict(
            {**V4, "vocab_size": None, "hidden_act": "gelu", "rope_scaling": {"rope_type": "yarn"}}
        )


def test_harmless_values_are_accepted() -> None:
    extra = {
        "pretraining_tp": 2,
        "use_cache": False,
        "rope_interleaved": False,
        "unsloth_version": "1",
        "sliding_window": 9,
    }
    assert LlamaConfig.from_hf_dict({**V4, **extra}) == LlamaConfig.from_hf_dict(V4)
    qwen = {**V4, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    assert LlamaConfig.from_hf_dict(qwen).qkv_bias
    idle = {**qwen, "use_sliding_window": True, "max_window_layers": 16}  # no layer is past it
    assert LlamaConfig.from_hf_dict(idle).qkv_bias


def test_a_family_that_cannot_say_it_is_refused() -> None:
    cfg = LlamaConfig.from_dict({**LlamaConfig.from_hf_dict(V4).to_dict(), "qk_norm": True})
    with pytest.raises(ValueError, match="qk_norm=True must be False"):
        cfg.to_hf_dict()
    with pytest.raises(ValueError, match="nonsense"):
        LlamaConfig.from_dict({**cfg.to_dict(), "nonsense": 1})
