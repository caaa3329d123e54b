"""Kernels for CUDA, in bfloat16 and through their interface, against one dense softmax in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.usp.test_kernels import dense
from usp.columns import columns
from usp.kernels import KERNELS, PACKED, Kernel, Segments, choose

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# bfloat16 keeps 8 bits: one rounding is 2^-9 relative; output and gradients pass through a few of them.
BF16 = 2e-2
# The log-sum-exp is float32 of scores summed in float32 from exact products. A soft cap of 1.5 may go through
# the tanh of the hardware, which is good to 2^-11 of it.
LSE = 2e-3

SCALE = 0.125
CASES: dict[str, Segments] = {
    "causal": Segments((0, 256, 512), (0, 256, 512), None, 0, SCALE),
    "causal, not a multiple": Segments((0, 333), (0, 333), None, 0, SCALE),
    "full": Segments((0, 256, 512), (0, 256, 512), None, None, SCALE),
    "full, fewer keys": Segments((0, 256, 512), (0, 100, 200), None, None, SCALE),
    "full, more keys": Segments((0, 100), (0, 513), None, None, SCALE),
    "full, one key": Segments((0, 64), (0, 1), None, None, SCALE),
    "packed": Segments((0, 3, 130, 256, 257, 512), (0, 3, 130, 256, 257, 512), None, 0, SCALE),
    "packed, full, other lengths": Segments((0, 3, 130, 300), (0, 70, 75, 400), None, None, SCALE),
    "causal, more keys": Segments((0, 100, 140), (0, 300, 400), None, 0, SCALE),
    "window": Segments((0, 512), (0, 512), 100, 0, SCALE),
    "window both ways": Segments((0, 256, 512), (0, 256, 512), 17, 40, SCALE),
    "window, packed, other lengths": Segments((0, 100, 333), (0, 200, 433), 150, 5, SCALE),
    "window to the left only": Segments((0, 200), (0, 200), 30, None, SCALE),
    "window to the right only": Segments((0, 200), (0, 150), None, 70, SCALE),
    "soft cap": Segments((0, 300), (0, 300), None, 0, SCALE, 1.5),
    "soft cap, packed, window": Segments((0, 100, 333), (0, 100, 333), 50, 0, SCALE, 1.5),
}
HEADS = {"grouped": (9, 3), "equal": (5, 5), "one kv head": (4, 1)}
CUDA_KERNELS = [name for name, kernel in KERNELS.items() if "cuda" in kernel.devices]


def pick(name: str, segments: Segments, size: int = 64, v_size: int = 64) -> Kernel:
    device = torch.device("cuda", torch.cuda.current_device())
    if not KERNELS[name].available(device):
        pytest.skip(f"{name} is not installed, or not for this device")
    features = segments.features
    return choose(name, device=device, dtype=torch.bfloat16, size=size, v_size=v_size, features=features)


def inputs(segments: Segments, heads: tuple[int, int], size: int = 64, v_size: int = 64) -> list[Tensor]:
    """q, k, v, do."""
    torch.manual_seed(sum(heads))
    rows, keys, (num, num_kv) = segments.cu_q[-1], segments.cu_k[-1], heads
    shapes = ((rows, num, size), (keys, num_kv, size), (keys, num_kv, v_size), (rows, num, v_size))
    return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def wanted(x: list[Tensor], segments: Segments) -> list[Tensor]:
    """o, lse, dq, dk, dv."""
    q, k, v = (t.double().requires_grad_() for t in x[:3])
    o, lse = dense(q, k, v, segments)
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), x[3].double())]


def check(got: tuple[Tensor, ...], want: list[Tensor]) -> None:
    for name, g, w in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert g.shape == w.shape, name
        assert g.dtype == (torch.float32 if name == "lse" else torch.bfloat16), name
        if name == "lse":
            assert g.is_contiguous()
            assert float((g.double() - w).abs().max()) < LSE
            continue
        # relative in the norm; a tensor that is zero (dq and dk of one key) by its largest entry
        error = float((g.double() - w).norm()) / max(float(w.norm()), 1.0)
        assert error < BF16, f"{name} is off by {error}"


# flash4 compiles every kind of call for some seconds: all head counts for two cases only
@pytest.mark.parametrize(
    ("case", "heads"),
    [(c, h) for c in CASES for h in HEADS if h == "grouped" or c in ("causal", "packed")],
)
@pytest.mark.parametrize("name", CUDA_KERNELS)
def test_equals_dense_float64(name: str, case: str, heads: str) -> None:
    segments = CASES[case]
    if not segments.features <= KERNELS[name].features:
        with pytest.raises(ValueError, match=f"kernel='{name}' must take .*Use one of: .*tiled, reference"):
            pick(name, segments)
        return
    kernel = pick(name, segments)
    q, k, v, do = x = inputs(segments, HEADS[heads])
    with torch.no_grad():
        o, lse = kernel.forward(q, k, v, segments)
        grads = kernel.backward(do, q, k, v, o, lse, segments)
    check((o, lse, *grads), wanted(x, segments))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        for name in CUDA_KERNELS
        for case in ("causal", "causal, not a multiple", "packed", "window")
        if CASES[case].features <= KERNELS[name].features
    ],
)
def test_views_of_one_buffer(name: str, case: str) -> None:
    """q, k, v side by side in each row, as one all-to-all brings them; do and o with gaps between rows.
    flash4 leaves the gradients side by side too."""
    segments = CASES[case]
    kernel = pick(name, segments)
    (num, num_kv), size = HEADS["grouped"], 64
    x = inputs(segments, (num, num_kv), size)
    q, k, v, do = x
    joined = torch.cat([t.flatten(1) for t in (q, k, v)], 1)
    q, k, v = columns(joined, [(n, size) for n in (num, num_kv, num_kv)])
    do = torch.cat([do, do], 1)[:, :num]
    assert not any(t.is_contiguous() for t in (q, k, v, do))
    alike = do[:1].expand_as(do)
    with torch.no_grad():
        o, lse = kernel.forward(q, k, v, segments)
        apart = torch.stack([o, o], 1)[:, 0]
        grads = kernel.backward(do, q, k, v, apart, lse, segments)
        of_one_row = kernel.backward(alike, q, k, v, apart, lse, segments)
    if name == "flash4":
        assert {t.untyped_storage().data_ptr() for t in grads} == {grads[0].data_ptr()}
        assert {t.stride(0) for t in grads} == {joined.shape[1]}
    check((o, lse, *grads), wanted(x, segments))
    check((o, lse, *of_one_row), wanted([q, k, v, alike], segments))


@pytest.mark.parametrize("sizes", [(128, 128), (80, 80), (192, 128), (256, 256), (64, 32), (40, 50)])
@pytest.mark.parametrize("name", CUDA_KERNELS)
def test_head_sizes(name: str, sizes: tuple[int, int]) -> None:
    segments = CASES["packed" if PACKED in KERNELS[name].features else "causal"]
    try:
        kernel = pick(name, segments, *sizes)
    except ValueError as refusal:
        assert max(sizes) > 128
        assert "head size" in str(refusal)  # noqa: PT017
        return
    q, k, v, do = x = inputs(segments, (6, 2), *sizes)
    with torch.no_grad():
        o, lse = kernel.forward(q, k, v, segments)
        grads = kernel.backward(do, q, k, v, o, lse, segments)
    check((o, lse, *grads), wanted(x, segments))


@pytest.mark.parametrize("lengths", [(256, (128, 384)), (130, (100, 301))], ids=["even", "uneven"])
@pytest.mark.parametrize("name", CUDA_KERNELS)
def test_backward_of_parts_with_the_whole_softmax(name: str, lengths: tuple[int, tuple[int, int]]) -> None:
    """A part of the keys with the o and lse of all of them gives its share of the gradients."""
    rows, (first, last) = lengths
    whole = Segments((0, rows), (0, last), None, None, SCALE)
    kernel = pick(name, whole)
    q, k, v, do = x = inputs(whole, (6, 2))
    cuts = ((0, first), (first, last))
    parts = [whole._replace(cu_k=(0, b - a)) for a, b in cuts]
    with torch.no_grad():
        halves = [kernel.forward(q, k[a:b], v[a:b], s) for (a, b), s in zip(cuts, parts, strict=True)]
        lse = torch.logaddexp(halves[0][1], halves[1][1])
        weights = [(lse_i - lse).exp().T.unsqueeze(2) for _, lse_i in halves]
        o = sum((w * o_i for w, (o_i, _) in zip(weights, halves, strict=True)), torch.zeros_like(q).float())
        o = o.to(q.dtype)
        grads = [
            kernel.backward(do, q, k[a:b], v[a:b], o, lse, s) for (a, b), s in zip(cuts, parts, strict=True)
        ]
    dq = (grads[0][0].float() + grads[1][0].float()).to(q.dtype)
    dk, dv = (torch.cat([g[i] for g in grads]) for i in (1, 2))
    check((o, lse, dq, dk, dv), wanted(x, whole))


@pytest.mark.parametrize("name", CUDA_KERNELS)
def test_causal_part_with_the_whole_softmax(name: str) -> None:
    """The later half of the queries, with views: of rows in memory, and of an lse that is not contiguous."""
    whole = Segments((0, 512), (0, 512), None, 0, SCALE)
    early = Segments((0, 256), (0, 256), None, None, SCALE)
    kernel = pick(name, whole)
    q, k, v, do = x = inputs(whole, (6, 2))
    want = wanted(x, whole)
    late = slice(256, 512)
    o, lse = want[0].to(q.dtype)[late], want[1].float()[:, late]
    with torch.no_grad():
        a = kernel.backward(do[late], q[late], k[:256], v[:256], o, lse, early)
        b = kernel.backward(do[late], q[late], k[late], v[late], o, lse, early._replace(right=0))
    dq = a[0].float() + b[0].float()
    for got, wish in ((dq, want[2]), (b[1], want[3]), (b[2], want[4])):
        assert float((got.double() - wish[late]).norm() / wish[late].norm()) < BF16


@pytest.mark.parametrize("name", CUDA_KERNELS)
def test_nothing_waits_for_the_device(name: str) -> None:
    segments = CASES["causal"] if name == "cudnn" else CASES["packed"]
    kernel = pick(name, segments)
    q, k, v, do = inputs(segments, (6, 2))
    with torch.no_grad():
        o, lse = kernel.forward(q, k, v, segments)  # compiles, and makes the boundaries
        kernel.backward(do, q, k, v, o, lse, segments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            o, lse = kernel.forward(q, k, v, segments)
            kernel.backward(do, q, k, v, o, lse, segments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
