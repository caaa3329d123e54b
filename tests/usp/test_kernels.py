"""Kernels for CPU against one dense softmax in float64, and the choice between all of them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.usp.dense import Watch, normal
from usp.kernels import KERNELS, Kernel, Segments, capabilities, choose
from usp.kernels import tiled as tiled_file
from usp.kernels.padding import padded
from usp.kernels.tiled import TILED

CPU = torch.device("cpu")
# float64: rounding of the same sums in another order, at values of size 1 to 10
EXACT = 1e-12
# float32 keeps 24 bits, one rounding is 6e-8 relative; sums of some tens of terms of size 1 to 10
FLOAT32 = 2e-5
# bfloat16 keeps 8 bits: one rounding is 2^-9 relative of values up to 10, and gradients pass through a few
BFLOAT16 = 1e-1

CASES: dict[str, Segments] = {
    "one": Segments((0, 19), (0, 19), None, 0, 0.4),
    "batch": Segments((0, 7, 14), (0, 7, 14), None, 0, 0.4),
    "full": Segments((0, 7, 14), (0, 7, 14), None, None, 0.4),
    "full, fewer keys": Segments((0, 9, 18), (0, 4, 8), None, None, 0.4),
    "full, more keys": Segments((0, 5), (0, 13), None, None, 0.4),
    "packed": Segments((0, 3, 4, 17), (0, 3, 4, 17), None, 0, 0.4),
    "packed, full, other lengths": Segments((0, 3, 4, 17), (0, 6, 8, 15), None, None, 0.4),
    "causal, more keys": Segments((0, 5, 18), (0, 8, 29), None, 0, 0.4),
    "window": Segments((0, 19), (0, 19), 3, 0, 0.4),
    "window both ways": Segments((0, 8, 19), (0, 8, 19), 2, 4, 0.4),
    "window, other lengths": Segments((0, 5, 16), (0, 9, 18), 4, 3, 0.4),
    "keys behind only": Segments((0, 6), (0, 10), None, -2, 0.4),
    "keys ahead only": Segments((0, 9), (0, 6), None, 5, 0.4),
    "soft cap": Segments((0, 8, 19), (0, 8, 19), None, 0, 0.4, 1.5),
    "soft cap in a window": Segments((0, 8, 19), (0, 11, 22), 5, 1, 0.4, 1.5),
}
HEADS = {"grouped": (6, 2), "one kv head": (5, 1), "equal": (3, 3)}
Result = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def visible(segments: Segments) -> Tensor:
    """[T, U] bool, from the words of `Segments`."""
    mask = torch.zeros(segments.cu_q[-1], segments.cu_k[-1], dtype=torch.bool)
    for (qa, qb), (ka, kb) in zip(pairwise(segments.cu_q), pairwise(segments.cu_k), strict=True):
        at = torch.arange(qb - qa).unsqueeze(1) + (kb - ka) - (qb - qa)
        key = torch.arange(kb - ka)
        seen = mask[qa:qb, ka:kb]
        seen.fill_(True)
        if segments.left is not None:
            seen &= key >= at - segments.left
        if segments.right is not None:
            seen &= key <= at + segments.right
    return mask


def dense(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with one [T, U] matrix a head."""
    hidden = ~visible(segments).to(q.device)
    group = q.shape[1] // k.shape[1]
    outs, sums = [], []
    for head in range(q.shape[1]):
        scores = segments.scale * (q[:, head] @ k[:, head // group].T)
        if segments.softcap:
            scores = segments.softcap * torch.tanh(scores / segments.softcap)
        scores = scores.masked_fill(hidden, -math.inf)
        sums.append(scores.logsumexp(1))
        outs.append(scores.softmax(1) @ v[:, head // group])
    return torch.stack(outs, 1), torch.stack(sums)


def wanted(q: Tensor, k: Tensor, v: Tensor, do: Tensor, segments: Segments) -> Result:
    leaves = [t.double().clone().requires_grad_() for t in (q, k, v)]
    o, lse = dense(leaves[0], leaves[1], leaves[2], segments)
    dq, dk, dv = torch.autograd.grad(o, leaves, do.double())
    return o.detach(), lse.detach(), dq, dk, dv


def inputs(
    segments: Segments, heads: tuple[int, int], *, size: int = 8, v_size: int = 8, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, do."""
    rows, keys = segments.cu_q[-1], segments.cu_k[-1]
    shapes = (
        (rows, heads[0], size),
        (keys, heads[1], size),
        (keys, heads[1], v_size),
        (rows, heads[0], v_size),
    )
    q, k, v, do = (normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    return q, k, v, do


def pick(name: str, segments: Segments, dtype: torch.dtype, size: int = 8, v_size: int = 8) -> Kernel:
    features = segments.features
    return choose(name, device=CPU, dtype=dtype, size=size, v_size=v_size, features=features)


def run(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, do: Tensor, segments: Segments) -> Result:
    """As a caller runs it, with what the interface promises of types and layout."""
    with torch.no_grad():
        o, lse = kernel.forward(q, k, v, segments)
        grads = kernel.backward(do, q, k, v, o, lse, segments)
    assert (o.dtype, o.shape) == (q.dtype, (*q.shape[:2], v.shape[2]))
    assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
    assert lse.is_contiguous()
    assert [(g.dtype, g.shape) for g in grads] == [(t.dtype, t.shape) for t in (q, k, v)]
    return o, lse, *grads


def close(got: Result, want: Result, tolerance: float) -> None:
    names = ("o", "lse", "dq", "dk", "dv")
    for name, g, w in zip(names, got, want, strict=True):
        assert g.shape == w.shape, name
        error = float((g.double() - w).abs().max())
        assert error < tolerance, f"{name} is off by {error}"


def able(name: str) -> list[str]:
    return [case for case, segments in CASES.items() if segments.features <= KERNELS[name].features]


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("name", "case"), [(name, case) for name in ("cpu", "tiled") for case in able(name)])
def test_equals_dense(name: str, case: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_file, "TILE", 4)  # several tiles in a segment, the last one short
    segments = CASES[case]
    x = inputs(segments, heads, dtype=torch.float64)
    close(run(pick(name, segments, torch.float64), *x, segments), wanted(*x, segments), EXACT)


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, FLOAT32),
        ("cpu", torch.bfloat16, BFLOAT16),
        ("tiled", torch.float32, FLOAT32),
        ("tiled", torch.bfloat16, BFLOAT16),
        ("tiled", torch.float16, BFLOAT16 / 8),  # three bits more than bfloat16
    ],
)
def test_narrow_types(name: str, dtype: torch.dtype, tolerance: float) -> None:
    segments = CASES["packed"]
    x = inputs(segments, (6, 2), dtype=dtype)
    close(run(pick(name, segments, dtype), *x, segments), wanted(*x, segments), tolerance)


@pytest.mark.parametrize("sizes", [(8, 5), (5, 8), (3, 3)])
@pytest.mark.parametrize("name", ["cpu", "tiled"])
def test_head_size_of_v(name: str, sizes: tuple[int, int]) -> None:
    segments = CASES["packed"]
    x = inputs(segments, (6, 2), size=sizes[0], v_size=sizes[1], dtype=torch.float64)
    kernel = pick(name, segments, torch.float64, *sizes)
    close(run(kernel, *x, segments), wanted(*x, segments), EXACT)
    assert kernel is pick(name, segments, torch.float64, *sizes)  # one object for torch.compile's guards


def test_padding_to_sizes_that_a_kernel_takes() -> None:
    segments = CASES["window"]
    eights = TILED._replace(sizes=lambda size, v_size: size == v_size and size % 8 == 0)
    for sizes in ((5, 5), (8, 3), (3, 9)):
        x = inputs(segments, (6, 2), size=sizes[0], v_size=sizes[1], dtype=torch.float64)
        kernel = padded(eights, *sizes)
        assert kernel is not None
        assert kernel is not eights
        close(run(kernel, *x, segments), wanted(*x, segments), EXACT)
    assert padded(eights._replace(sizes=lambda size, v_size: False), 5, 5) is None


@pytest.mark.parametrize(("name", "case"), [("cpu", "full"), ("tiled", "full"), ("tiled", "soft cap, full")])
def test_backward_of_parts_with_the_whole_softmax(name: str, case: str) -> None:
    """A part of the keys with the o and lse of all of them gives its share of the gradients."""
    softcap = 1.5 if "cap" in case else 0.0
    whole = Segments((0, 7), (0, 12), None, None, 0.4, softcap)
    q, k, v, do = inputs(whole, (6, 2), dtype=torch.float64)
    want = wanted(q, k, v, do, whole)
    kernel = pick(name, whole, torch.float64)
    cuts = ((0, 5), (5, 12))
    parts = [whole._replace(cu_k=(0, b - a)) for a, b in cuts]
    halves = [kernel.forward(q, k[a:b], v[a:b], s) for (a, b), s in zip(cuts, parts, strict=True)]
    lse = torch.logaddexp(halves[0][1], halves[1][1])
    o = sum((o_i * (lse_i - lse).exp().T.unsqueeze(2) for o_i, lse_i in halves), torch.zeros_like(q))
    grads = [kernel.backward(do, q, k[a:b], v[a:b], o, lse, s) for (a, b), s in zip(cuts, parts, strict=True)]
    dq = grads[0][0] + grads[1][0]
    dk, dv = (torch.cat([g[i] for g in grads]) for i in (1, 2))
    close((o, lse, dq, dk, dv), want, EXACT)


@pytest.mark.parametrize("name", ["cpu", "tiled"])
def test_causal_part_with_the_whole_softmax(name: str) -> None:
    """The later half of the queries: all earlier keys in full, their own causally; strided views of rows."""
    whole = Segments((0, 12), (0, 12), None, 0, 0.4)
    q, k, v, do = inputs(whole, (6, 2), dtype=torch.float64)
    want = wanted(q, k, v, do, whole)
    late = slice(6, 12)
    o, lse = want[0][late], want[1][:, late]  # lse: not contiguous
    early = Segments((0, 6), (0, 6), None, None, 0.4)
    own = early._replace(right=0)
    kernel = pick(name, early, torch.float64)
    a = kernel.backward(do[late], q[late], k[:6], v[:6], o, lse, early)
    b = kernel.backward(do[late], q[late], k[late], v[late], o, lse, own)
    assert float((a[0] + b[0] - want[2][late]).abs().max()) < EXACT
    assert float((b[1] - want[3][late]).abs().max()) < EXACT
    assert float((b[2] - want[4][late]).abs().max()) < EXACT


def test_tiled_makes_nothing_of_sequence_squared() -> None:
    length, window = 4 * tiled_file.TILE, 64
    for left, keys in ((None, length), (window, tiled_file.TILE + window)):
        segments = Segments((0, length), (0, length), left, 0, 0.4)
        x = inputs(segments, (2, 1), dtype=torch.float32)
        with Watch() as watch:
            run(pick("tiled", segments, torch.float32), *x, segments)
        assert watch.largest <= 2 * tiled_file.TILE * keys


@pytest.mark.parametrize(
    ("name", "dtype", "sizes", "case", "message"),
    [
        ("cudnn", torch.float32, (8, 8), "packed", r"device cpu, torch.float32, packed \(.*\), and does not"),
        ("flash", torch.bfloat16, (8, 8), "one", r"must take device cpu, and.* one of: cpu, tiled, ref"),
        ("flash", torch.bfloat16, (300, 8), "one", "device cpu, head size 300 with 8 for v"),
        (
            "cpu",
            torch.float16,
            (8, 8),
            "one",
            "take torch.float16, and does not. Use one of: tiled, ref",
        ),
        (
            "cpu",
            torch.float64,
            (8, 8),
            "window",
            r"take window \(a band .*Use one of: tiled, ref",
        ),
        ("cpu", torch.float64, (8, 8), "soft cap", r"take softcap \(.*Use one of: tiled, reference, auto"),
        ("tiled", torch.int32, (8, 8), "one", "take torch.int32, and does not. Use one of: reference.$"),
        ("auto", torch.int32, (8, 8), "one", "kernel='auto' must find a kernel for cpu torch.int32"),
        (
            "none",
            torch.float64,
            (8, 8),
            "one",
            "kernel='none' must be a kernel's name.*cpu, tiled, ref",
        ),
    ],
)
def test_refused(name: str, dtype: torch.dtype, sizes: tuple[int, int], case: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pick(name, CASES[case], dtype, *sizes)


def test_auto_takes_the_first_that_can() -> None:
    assert pick("auto", CASES["packed"], torch.float32).name == "cpu"
    assert pick("auto", CASES["window"], torch.float32).name == "tiled"
    assert pick("auto", CASES["packed"], torch.float16).name == "tiled"
    assert list(KERNELS) == ["flash4", "cudnn", "flash", "cpu", "tiled"]


def test_capabilities_hold_every_kernel() -> None:
    lines = capabilities().splitlines()
    table = {line.split()[0]: line for line in lines if line}
    for name, kernel in KERNELS.items():
        assert all(str(dtype).removeprefix("torch.") in table[name] for dtype in kernel.dtypes)
        assert table[name].split().count("yes") == len(kernel.features)
    assert "reference" in table
    assert any(line.startswith("all: causal and bidirectional") for line in lines)
    assert any(line.startswith("all: sinks") for line in lines)


def test_operators_of_flash4_know_their_shapes() -> None:
    """What torch.compile is told without running them."""
    q, k = (torch.empty(14, n, 64, dtype=torch.bfloat16, device="meta") for n in (6, 2))
    segments = CASES["packed"]
    kernel = KERNELS["flash4"]
    o, lse = kernel.forward(q, k, k, segments)
    assert (o.shape, o.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((6, 14), torch.float32)
    grads = kernel.backward(o, q, k, k, o, lse, segments)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]
