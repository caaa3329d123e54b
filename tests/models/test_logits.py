"""The comparison with Transformers is sharp, its loss is ours, and initial values are what they should be."""

from pathlib import Path

import pytest
import torch

from tests.models.batches import ONE, TABLE, tokens_of, whole
from tests.models.tiny import hf_model, save_hf
from usp.mesh import TABLES
from usp.models import Params, from_hf, init, logits, loss, map_params, named_leaves, param_specs
from usp.models.config import LlamaConfig


def ours(path: Path, dtype: torch.dtype) -> tuple[LlamaConfig, Params]:
    return from_hf(path, dtype=dtype)


def test_mistaken_rope_is_seen(tmp_path: Path) -> None:
    """Logits compared (test_families.py) tell mistakes: frequencies without the llama3 bands miss by far."""
    model = hf_model("llama3 rope")
    cfg, params = ours(save_hf(model, tmp_path / "hf"), torch.float32)
    plain = LlamaConfig.from_dict({**cfg.to_dict(), "rope": {}})
    tokens = tokens_of(1, 80)
    got = logits(params, whole(tokens), plain, table=TABLE, mesh=ONE)
    assert (got - model(tokens).logits).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["gqa 6/2", "gqa 9/3 tied"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_loss_equals_transformers(name: str, remat: str, tmp_path: Path) -> None:  # case H72: tied
    model = hf_model(name)
    cfg, params = ours(save_hf(model, tmp_path / "hf"), torch.float32)
    tokens = tokens_of(2, 33)
    with torch.no_grad():
        want = model(tokens, labels=tokens).loss
        got = loss(params, whole(tokens), cfg, table=TABLE, mesh=ONE, remat=remat)
    torch.testing.assert_close(got, want, atol=0, rtol=1e-6)  # mean of 64 float32 losses


def test_init_depends_on_seed_and_name_only() -> None:
    cfg = LlamaConfig(
        vocab_size=31, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, qkv_bias=True
    )
    one, same, other = init(cfg, seed=3), init(cfg, seed=3), init(cfg, seed=4)
    values = dict(named_leaves(one))
    assert all(torch.equal(v, dict(named_leaves(same))[n]) for n, v in values.items())
    assert not torch.equal(one.embed, other.embed)
    assert not torch.equal(one.layers[0].wq, one.layers[1].wq)
    assert not torch.equal(one.layers[0].wk, one.layers[0].wv)
    assert one.layers[0].norm_attn.eq(1).all()
    assert one.layers[0].bq.eq(0).all()
    assert one.layers[0].bo is None
    assert abs(one.embed.std().item() - cfg.init_std) < 0.005
    specs = dict(named_leaves(param_specs(cfg, TABLES["ulysses"])))
    assert specs.keys() == values.keys()
    assert map_params(lambda name, leaf: leaf, one).lm_head is one.lm_head
