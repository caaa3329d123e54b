"""The kernel that rotates q and k into the wire's order, and the one back, against plain torch in float64."""

import pytest
import torch

from usp.heads import wire
from usp.models.rope import rope
from usp.wire import can_wire, from_wire, to_wire, turned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "length", "heads", "kv_heads", "size", "ranks"),
    [(1, 70, 8, 4, 64, 2), (2, 33, 4, 2, 80, 2), (3, 5, 12, 4, 128, 4), (1, 4099, 32, 8, 128, 2)],
)
def test_equals_float64(
    rows: int, length: int, heads: int, kv_heads: int, size: int, ranks: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    # columns of one buffer, as a joined product would leave them
    joined = torch.randn(rows, length, heads + 2 * kv_heads, size, device="cuda").to(dtype)
    q, k, v = (t.requires_grad_() for t in joined.split((heads, kv_heads, kv_heads), 2))
    angle = torch.randn(rows, length, 1, size // 2, device="cuda").repeat(1, 1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    assert can_wire(q)
    got = to_wire((q, k, v), ranks, turn=(cos, sin))
    turned = [rope(t.double(), cos.double(), sin.double()) for t in (q, k)]
    want = wire([*turned, v.double()], ranks)
    grad = torch.randn_like(got)
    found = torch.autograd.grad(got, (q, k, v), grad)
    wished = torch.autograd.grad(want, (q, k, v), grad.double())
    # one rounding at the end: half a unit in the last place; float32 also rounds the products before the sum
    tolerance = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8}[dtype]
    for one, other in zip((got, *found), (want, *wished), strict=True):
        assert one.shape == other.shape
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=2 * tolerance)


def test_copies_are_exact() -> None:
    """Without a rotation nothing is rounded, there and back, for odd sizes too, at rows far into memory."""
    torch.manual_seed(1)
    x = torch.randn(2, 37, 6, 33, device="cuda", dtype=torch.bfloat16).requires_grad_()
    y = torch.randn(2, 37, 9, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    got = to_wire((x, y), 3)
    cut = [t.double() for t in (x, y)]
    parts = [t.view(2, 37, 3, -1).permute(2, 1, 0, 3) for t in cut]
    assert torch.equal(got.double(), torch.cat(parts, 3))
    back = from_wire(got, ((6, 33), (9, 64)))
    assert torch.equal(back[0], x)
    assert torch.equal(back[1], y)
    ups = [torch.randn_like(t) for t in (x, y)]
    for found, up in zip(torch.autograd.grad(back, (x, y), ups), ups, strict=True):
        assert torch.equal(found, up)


def test_turned_alone() -> None:
    """Heads that are columns of a wider product."""
    torch.manual_seed(2)
    whole = torch.randn(2, 65, 7, 128, device="cuda").requires_grad_()
    x = whole[:, :, 2:5]
    angle = torch.randn(2, 65, 1, 64, device="cuda").repeat(1, 1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    got, want = turned(x, cos, sin), rope(x.double(), cos.double(), sin.double())
    up = torch.randn_like(got)
    found = torch.autograd.grad(got, whole, up)[0]
    wished = torch.autograd.grad(want, whole, up.double())[0]
    for one, other in ((got, want), (found, wished)):  # float32 rounds the products and their sum
        torch.testing.assert_close(one.double(), other.double(), rtol=2.0**-22, atol=2.0**-21)


def test_large_offsets() -> None:
    """Entries beyond 2^31 of one buffer."""
    x = torch.randn(1, 530_000, 32, 128, device="cuda", dtype=torch.bfloat16)
    wired = to_wire((x,), 2)
    assert x.numel() > 2**31
    assert torch.equal(wired[1, -5:, 0].view(5, 16, 128), x[0, -5:, 16:])
    assert torch.equal(from_wire(wired, ((32, 128),))[0][0, -5:], x[0, -5:])


def test_heads_that_lie_far_apart() -> None:
    """Of a view of [B, N, S, H]: the last of 17 heads starts 2^31 entries behind the first."""
    base = torch.zeros(1, 17, 2**20, 128, device="cuda", dtype=torch.bfloat16)
    base[:, 16, -3:] = torch.randn(1, 3, 128, device="cuda")
    wired = to_wire([base.transpose(1, 2)], 1)
    assert torch.equal(wired[0, :, 0, 16 * 128 :], base[0, 16])
    assert not wired[0, :, 0, : 16 * 128].any()
