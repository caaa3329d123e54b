"""Every family and rotary type computes what Transformers computes, beyond the original context too."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.batches import ONE, TABLE, tokens_of, whole
from tests.models.tiny import BASE, EVERY, LLAMA3, MODELS, WINDOWED, YARN, hf_model, load_hf, save_hf
from usp.models import LlamaConfig, from_hf, logits, to_hf
from usp.models.rope import attention_scale, inverse_frequencies, rope_cos_sin

ROPES: dict[str, dict[str, Any]] = {
    name: fields["rope_parameters"] for name, fields in MODELS.items() if "rope_parameters" in fields
} | {
    "llama3 as published": {
        **LLAMA3, "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192
    },
    "yarn without its factor": {**YARN, "factor": None},
    "yarn over a short range": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "linear": {"rope_type": "linear", "factor": 3, "rope_theta": 77.0},
}  # fmt: skip


def hf_module(config: Any) -> Any:
    """The rotary module of one model, fresh: the dynamic one remembers the longest sequence it has seen."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_angles_equal_transformers(name: str) -> None:
    hf = AutoConfig.for_model(**{**BASE, "rope_parameters": dict(ROPES[name])})
    cfg = LlamaConfig.from_hf_dict(hf.to_dict())
    if not cfg.rope.needs_length:
        want, scale = ROPE_INIT_FUNCTIONS[cfg.rope.rope_type](hf)
        assert torch.equal(inverse_frequencies(cfg), want)  # same operations, same bits
        assert attention_scale(cfg) == scale
    for length in (20, 32, 33, 64, 65, 80, 1000):
        positions = torch.arange(length)[None]
        want = hf_module(hf)(torch.zeros(1), positions)
        got = rope_cos_sin(positions, cfg, torch.float32, seq_len=length)
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g[:, :, 0], w), (length, (g[:, :, 0] - w).abs().max())


@pytest.mark.parametrize("name", ["dynamic rope", "longrope"])
def test_length_is_that_of_the_whole_sequence(name: str) -> None:
    """What a rank holds does not decide: its part of the angles is that part of the whole's."""
    cfg = LlamaConfig.from_hf_dict(AutoConfig.for_model(**{**BASE, **MODELS[name]}).to_dict())
    positions = torch.arange(80)[None]
    cos, sin = rope_cos_sin(positions, cfg, torch.float32, seq_len=80)
    for part in (slice(0, 20), slice(20, 40), slice(60, 80)):
        got = rope_cos_sin(positions[:, part], cfg, torch.float32, seq_len=80)
        assert torch.equal(got[0], cos[:, part])
        assert torch.equal(got[1], sin[:, part])
    first = rope_cos_sin(positions[:, :20], cfg, torch.float32, seq_len=20)[0]
    assert (first - cos[:, :20]).abs().max() > 0.1  # the first rank alone would be far off
    with pytest.raises(ValueError, match="seq_len=None must be the length of the whole sequence"):
        rope_cos_sin(positions, cfg, torch.float32)


def same_logits(model: Any, path: Path, length: int) -> None:
    cfg, params = from_hf(path)
    tokens = tokens_of(2, length)
    with torch.no_grad():
        want = model(tokens).logits
        got = logits(params, whole(tokens), cfg, table=TABLE, mesh=ONE)
    assert want.std() > 0.5
    # float32: both sum the same products, attention in another order; 80 keys, 4 layers, values below 30
    torch.testing.assert_close(got, want, atol=2e-4, rtol=0)

    cfg, params = from_hf(path, dtype=torch.float64)
    with torch.no_grad():
        want = model.double()(tokens).logits
        got = logits(params, whole(tokens), cfg, table=TABLE, mesh=ONE)
    # Transformers normalises in float32 even here, so its own result carries float32 rounding in every norm
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("length", [20, 80])  # within every original length, and beyond every maximum
def test_logits(name: str, length: int, tmp_path: Path) -> None:
    model = hf_model(name)
    same_logits(model, save_hf(model, tmp_path / "hf"), length)


@pytest.mark.parametrize("name", ["gqa 6/2", "gqa 9/3 tied", "qwen2 tied, yarn rope"])
def test_padded_vocabulary(name: str, tmp_path: Path) -> None:
    """Rows that no token uses are part of the model: they have logits, and survive the way back."""
    model = hf_model(name, pad_token_id=100)
    model.resize_token_embeddings(103, pad_to_multiple_of=64, mean_resizing=False)
    path = save_hf(model, tmp_path / "hf")
    same_logits(model, path, 40)
    cfg, params = from_hf(path)
    assert cfg.vocab_size == params.embed.shape[0] == 128
    to_hf(params, cfg, tmp_path / "out", source=path)
    again, info = load_hf(tmp_path / "out")
    assert not any(info.values()), info
    assert again.config.vocab_size == 128
    assert again.config.pad_token_id == 100
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_head_size_of_qwen2_may_be_given(tmp_path: Path) -> None:
    """Its configuration has no such key, but Transformers follows one that is there."""
    model = hf_model("qwen2", head_dim=14)
    path = save_hf(model, tmp_path / "hf")
    same_logits(model, path, 40)
    assert from_hf(path)[0].head_dim == 14


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_are_seen(name: str, tmp_path: Path) -> None:
    """The comparison above tells a window from a neighbouring size, and from none."""
    model = hf_model(name)
    cfg, params = from_hf(save_hf(model, tmp_path / "hf"))
    tokens = tokens_of(2, 30)
    with torch.no_grad():
        want = model(tokens).logits
        for windows in (
            (),
            tuple(w and w + 1 for w in cfg.windows),
            tuple(w and w - 1 for w in cfg.windows),
            cfg.windows[::-1] if len(set(cfg.windows)) > 1 and cfg.windows != cfg.windows[::-1] else (),
        ):
            other = dataclasses.replace(cfg, windows=windows)
            got = logits(params, whole(tokens), other, table=TABLE, mesh=ONE)
            assert (got - want).abs().max() > 1e-2, windows
