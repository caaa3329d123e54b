"""config.json of both generations, and what is refused by name."""

from typing import Any

import pytest
from transformers import AutoConfig

from tests.models.tiny import BASE, EVERY
from usp.models import LlamaConfig, Rope

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


@pytest.mark.parametrize("name", EVERY)
def test_write_then_read_is_the_same(name: str) -> None:
    hf = AutoConfig.for_model(**{**BASE, **EVERY[name]})
    cfg = LlamaConfig.from_hf_dict(hf.to_dict())
    written = cfg.to_hf_dict(dtype="bfloat16")
    assert LlamaConfig.from_hf_dict(written) == cfg
    assert LlamaConfig.from_dict(cfg.to_dict()) == cfg
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    # A reader of the older generation looks at these two alone.
    older = {k: v for k, v in written.items() if k not in ("rope_parameters", "dtype")}
    assert LlamaConfig.from_hf_dict(older) == cfg
    assert AutoConfig.for_model(**written).rope_parameters == hf.rope_parameters


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other family": ({"model_type": "gemma2"}, "model_type='gemma2'"),
    # case H21: routers count over the whole sequence, which no rank has
    "experts": ({"model_type": "qwen3_moe", "num_experts": 8}, "model_type='qwen3_moe'"),
    "experts by another name": ({"num_local_experts": 8}, "num_local_experts=8"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "own code": ({"auto_map": {"AutoModelForCausalLM": "m.Model"}}, "auto_map"),
    "soft cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
    "interleaved rope": ({"rope_interleaved": True}, "rope_interleaved"),
    "attention both ways": ({"is_causal": False}, "is_causal=False must be true or absent"),
    "attention both ways by null": ({"is_causal": None}, "is_causal=None must be true or absent"),
    "no kv heads": ({"num_key_value_heads": 0}, "num_key_value_heads=0 must be a positive integer"),
    "head_dim of nothing": ({"head_dim": 0}, "head_dim=0 must be a positive integer, or absent"),
    "no base": ({"rope_theta": 0}, "rope_theta=0.0 must be a positive number"),
    "no base inside": ({"rope_scaling": {"type": "linear", "factor": 2, "rope_theta": 0}}, "rope_theta=0.0"),
    "rope of no name": ({"rope_scaling": {"rope_type": ""}}, "rope_type='' must be one of"),
    "no rope": ({"partial_rotary_factor": 0.0}, "partial_rotary_factor=0.0 must be 1.0"),
    "no rope inside": (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0}},
        "partial_rotary_factor=0 must be 1.0",
    ),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "unknown rope": ({"rope_scaling": {"rope_type": "proportional", "factor": 4.0}}, "'proportional'"),
    "rope that is no object": ({"rope_scaling": [4.0]}, "rope_parameters=[4.0] must be an object"),
    "factor as text": ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2' must be a number"),
    "factor below zero": ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor=-2 must be a positive"),
    "lists of another length": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [1.0] * 31}},
        "long_factor must hold head_dim / 2 numbers, got 31",
    ),
    "list of texts": (
        {"rope_scaling": {"type": "longrope", "short_factor": ["1"] * 32, "long_factor": [1.0] * 32}},
        "must be a list of numbers",
    ),
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
    "window of nothing": ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0"),
    "mistral's layers differ": (
        {"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"] * 8},
        "layer_types must agree with sliding_window=4096 for mistral",
    ),
    "other kinds of layers": (
        {"model_type": "qwen3", "layer_types": ["chunked_attention"] * 16},
        "layer_types='chunked_attention'",
    ),
    "sliding layers without a window": (
        {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 16},
        "no sliding_window applies",
    ),
    "too few layer types": (
        {"model_type": "qwen3", "layer_types": ["full_attention"]},
        "one type for each of the 16 layers",
    ),
    "eps as text": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be a number"),
    "tie as text": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' must be true or false"),
    "a size beyond reason": ({"num_hidden_layers": 10**12}, "num_layers=1000000000000 must be a positive"),
    "layers beyond reason": ({"num_hidden_layers": 10**8}, "num_layers=100000000 must be at most"),
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
    with pytest.raises(ValueError, match=r"vocab_size is missing.*hidden_act='gelu'.*rope_type='axial'"):
        LlamaConfig.from_hf_dict(
            {**V4, "vocab_size": None, "hidden_act": "gelu", "rope_scaling": {"rope_type": "axial"}}
        )
    with pytest.raises(ValueError, match=r"hidden_act='gelu'.*num_kv_heads=7.*head_dim=63"):
        LlamaConfig.from_hf_dict({**V4, "hidden_act": "gelu", "num_key_value_heads": 7, "head_dim": 63})


def test_harmless_values_are_accepted() -> None:
    extra = {
        "pretraining_tp": 2,
        "use_cache": False,
        "is_causal": True,
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


QWEN = {**V4, "model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 9}


def test_windows_of_layers() -> None:
    def windows(config: dict[str, Any]) -> tuple[int | None, ...]:
        cfg = LlamaConfig.from_hf_dict(config)
        assert LlamaConfig.from_hf_dict(cfg.to_hf_dict()) == cfg
        return tuple(cfg.window_of(layer) for layer in range(cfg.num_layers))

    mistral = {**V4, "model_type": "mistral"}
    assert windows(mistral) == (4096,) * 16  # an absent key is not the same as null
    assert windows({**mistral, "sliding_window": None}) == (None,) * 16
    assert windows({**mistral, "sliding_window": 5, "layer_types": ["sliding_attention"] * 16}) == (5,) * 16
    assert windows({**QWEN, "max_window_layers": 1}) == (None, 9, 9, 9)
    assert windows(QWEN) == (None,) * 4  # max_window_layers is 28 where it is absent
    assert windows({**QWEN, "use_sliding_window": False, "max_window_layers": 0}) == (None,) * 4
    types = ["sliding_attention", "full_attention"] * 2
    assert windows({**QWEN, "model_type": "qwen3", "layer_types": types}) == (9, None, 9, None)


def test_windows_are_checked_and_only_a_family_that_has_them_writes_them() -> None:
    fields = {**LlamaConfig.from_hf_dict(QWEN).to_dict(), "windows": [3, None, 3, None]}
    cfg = LlamaConfig.from_dict(fields)
    assert cfg.to_hf_dict()["layer_types"][:2] == ["sliding_attention", "full_attention"]
    assert LlamaConfig.from_dict({**fields, "windows": [None] * 4}).windows == ()
    for windows in ([3], [3, None, 0, 3], [3, None, 3, True]):
        with pytest.raises(ValueError, match="windows must"):
            LlamaConfig.from_dict({**fields, "windows": windows})
    for changes in ({"windows": [3, 4, 3, 4]}, {"model_type": "llama", "qkv_bias": False}):
        with pytest.raises(ValueError, match=r"windows=.* must be \(\) to be written"):
            LlamaConfig.from_dict({**fields, **changes}).to_hf_dict()


def test_length_before_an_extension() -> None:
    """Beside the rotary parameters it wins; where it is absent yarn takes max_position_embeddings."""
    yarn = {**V4, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert LlamaConfig.from_hf_dict(yarn).rope.original_max_position == 131072
    inside = {**V4, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}}
    assert LlamaConfig.from_hf_dict(inside).rope.original_max_position == 100
    beside = {**inside, "original_max_position_embeddings": 50}
    assert LlamaConfig.from_hf_dict(beside).rope.original_max_position == 50
    for config in (yarn, inside, beside):
        hf = AutoConfig.for_model(**config)
        hf.standardize_rope_params()  # as the model does when it is built
        ours = LlamaConfig.from_hf_dict(config).rope.original_max_position
        assert hf.rope_parameters["original_max_position_embeddings"] == ours
