"""CUDA kernels against a dense softmax in float64."""

import math

import pytest
import torch
from torch import Tensor

from usp import attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# bfloat16 keeps 8 bits: one rounding is 2^-9 relative; output and gradients pass through a few of them.
BF16 = 2e-2


def dense(q: Tensor, k: Tensor, v: Tensor, edges: list[int], causal: bool) -> Tensor:
    """[B, S, N, H] attention written out, documents given by `edges` over the B * S rows."""
    rows, length, num_heads, size = q.shape
    k, v = (t.repeat_interleave(num_heads // k.shape[2], 2) for t in (k, v))
    q, k, v = (t.reshape(rows * length, num_heads, size) for t in (q, k, v))
    at = torch.arange(rows * length, device=q.device)
    document = torch.bucketize(at, torch.tensor(edges[1:], device=q.device), right=True)
    seen = document[:, None] == document[None, :]
    if causal:
        seen &= at[:, None] >= at[None, :]
    scores = torch.einsum("qnh,snh->nqs", q, k) / math.sqrt(size)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("nqs,snh->qnh", weights, v).view(rows, length, num_heads, size)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("heads", [(9, 3), (5, 5), (4, 1)])
@pytest.mark.parametrize("kernel", ["cudnn", "flash", "reference"])
def test_kernel_equals_dense_float64(kernel: str, heads: tuple[int, int], packed: bool, causal: bool) -> None:
    if kernel == "cudnn" and packed:
        with pytest.raises(ValueError, match="packed documents"):
            attention(*make((1, 1)), cu_seqlens=torch.tensor([0, 5, 256, 512]), kernel=kernel)
        return
    q, k, v = make(heads)
    edges = [0, 3, 130, 256, 257, 512] if packed else [0, 256, 512]
    cu = torch.tensor(edges, dtype=torch.int32) if packed else None
    up = torch.randn_like(q)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (attention(q, k, v, cu_seqlens=cu, causal=causal, kernel=kernel) * up).sum()

    def wanted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (dense(q, k, v, edges, causal) * up.double()).sum()

    out = attention(q, k, v, cu_seqlens=cu, causal=causal, kernel=kernel)
    wide = [t.double() for t in (q, k, v)]
    assert error(out, dense(*wide, edges, causal)) < BF16
    grads = torch.func.grad(ours, argnums=(0, 1, 2))(q, k, v)
    references = torch.func.grad(wanted, argnums=(0, 1, 2))(*wide)
    for got, reference in zip(grads, references, strict=True):
        assert got.dtype == q.dtype
        assert error(got, reference) < BF16


def make(heads: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(sum(heads))
    counts = (heads[0], heads[1], heads[1])
    q, k, v = (torch.randn(2, 256, n, 64, device="cuda", dtype=torch.bfloat16) for n in counts)
    return q, k, v


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())
