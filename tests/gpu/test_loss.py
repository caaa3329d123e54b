"""The kernel over the logits of a tile against plain torch in float64."""

import pytest
import torch

from usp.batch import IGNORE
from usp.loss_tile import in_plain_torch, tile_pass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]


def data(tokens: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with entries of -inf, one of them from the first to the middle; labels at both ends, and none."""
    torch.manual_seed(vocab)
    logits = (4 * torch.randn(tokens, vocab, device="cuda")).to(dtype)
    labels = torch.randint(vocab, (tokens,), device="cuda")
    logits[2, : vocab // 2], labels[2] = -torch.inf, vocab - 1
    labels[0], labels[1], labels[3], labels[-1] = 0, vocab - 1, IGNORE, IGNORE
    return logits, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "vocab"), [(300, 128256), (7, 8192), (5, 8193), (6, 50), (65, 32003), (5, 2)]
)
def test_equals_float64(tokens: int, vocab: int, dtype: torch.dtype) -> None:
    logits, labels = data(tokens, vocab, dtype)
    want_loss, want = in_plain_torch(logits.double(), labels)
    place = logits.data_ptr()
    loss, found = tile_pass(logits, labels)
    assert found.data_ptr() == place  # over the logits
    assert (found.dtype, loss.dtype) == (dtype, torch.float32)
    assert not found[labels == IGNORE].any()
    # float32 sums of up to 128256 positive terms in blocks: some 20 roundings in a row
    torch.testing.assert_close(loss.double(), want_loss, rtol=2.0**-20, atol=0.0)
    # rounded once to dtype; before that exp(logit - sum) is off by what float32 is at the sum, about 10;
    # near zero by the spacing of float16 there, 2^-24, and of float32 at 1, which the label's entry subtracts
    once = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    torch.testing.assert_close(found.double(), want, rtol=once + 2.0**-18, atol=2.0**-24)


def test_rows_apart_and_no_rows() -> None:
    wide = torch.randn(4, 100, device="cuda")
    rest = wide[:, 60:].clone()
    labels = torch.tensor([[5, 1], [59, 2], [IGNORE, 3], [0, 4]], device="cuda", dtype=torch.int32)[:, 0]
    want_loss, want = in_plain_torch(wide[:, :60].clone(), labels.long())
    loss, found = tile_pass(wide[:, :60], labels)
    torch.testing.assert_close(loss, want_loss)
    torch.testing.assert_close(found, want)
    assert torch.equal(wide[:, 60:], rest)
    assert float(tile_pass(wide[:0], labels[:0])[0]) == 0.0


def test_a_label_that_is_no_token_is_not_hidden() -> None:
    for label in (50, -1, 2**40):
        logits = torch.randn(3, 50, device="cuda")
        loss, found = tile_pass(logits, torch.tensor([1, label, 2], device="cuda"))
        assert loss.isnan()
        assert found.isnan().all(1).tolist() == [False, True, False]
