"""Sliding windows of layers: another number of layers, and the keys that a query sees."""

from dataclasses import replace

import numpy as np
import pytest

from usp.models import LlamaConfig
from usp.models.attended import mean_keys

CFG = LlamaConfig(
    vocab_size=64, hidden_size=24, intermediate_size=32, num_layers=4, num_heads=4, num_kv_heads=2,
    windows=(None, 9, 9, None), qkv_bias=True, model_type="qwen2",
)  # fmt: skip


def test_another_number_of_layers() -> None:
    """Windows are cut, or start again, and config.json can still say them."""
    for num, windows in ((1, ()), (3, (None, 9, 9)), (4, CFG.windows), (6, (*CFG.windows, None, 9))):
        other = CFG.with_layers(num)
        assert (other.num_layers, other.windows) == (num, windows)
        assert LlamaConfig.from_hf_dict(other.to_hf_dict()) == other
    assert CFG.with_layers(4) == CFG
    full = replace(CFG, windows=())
    assert full.with_layers(40) == replace(full, num_layers=40)
    with pytest.raises(ValueError, match="num_layers=0 must be a positive integer"):
        CFG.with_layers(0)


@pytest.mark.parametrize("seq_len", [1, 8, 9, 40])
def test_keys_that_a_query_sees(seq_len: int) -> None:
    """Against the mask itself. The custom counts half of a square: of its diagonal, too, only half."""
    query, key = np.arange(seq_len)[:, None], np.arange(seq_len)
    keys = []
    for window in (seq_len, 9, 1, 8):
        pairs = ((key <= query) & (query - key < window)).sum()
        keys.append((pairs - min(window, seq_len) / 2) / seq_len)
    cfg = replace(CFG, windows=(None, 9, 1, 8))
    assert mean_keys(cfg, seq_len) == pytest.approx(sum(keys) / 4)
    assert mean_keys(cfg, seq_len, [1, 3, 1]) == pytest.approx((2 * keys[1] + keys[3]) / 3)
    assert mean_keys(cfg, seq_len, []) == 0
    assert mean_keys(replace(cfg, windows=()), seq_len) == seq_len / 2
