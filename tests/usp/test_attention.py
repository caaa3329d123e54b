"""Attention kernels against one dense float64 softmax: values, gradients, documents, perturbation."""

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.usp.dense import dense_attention, normal, visible
from usp import attention


class Case(NamedTuple):
    """B, S, N, K, H and document boundaries over the B rows laid end to end; None: whole rows."""

    shape: tuple[int, int, int, int, int]
    edges: list[int] | None


CASES = {
    "one token": Case((1, 1, 1, 1, 8), None),
    "one head, two tokens": Case((1, 2, 1, 1, 4), None),
    "rows": Case((3, 7, 6, 2, 8), None),
    "packed": Case((2, 7, 6, 2, 8), [0, 3, 4, 7, 9, 14]),
    "as many boundaries as rows would have": Case((2, 4, 2, 1, 8), [0, 3, 4, 8]),
    "every token a document": Case((1, 5, 3, 3, 8), [0, 1, 2, 3, 4, 5]),
    "mqa, 4 rows": Case((4, 5, 7, 1, 16), None),
    "longer than a tile": Case((1, 1100, 2, 1, 8), [0, 530, 531, 1100]),  # tiles of 512, one document beyond
    "long row": Case((1, 1100, 2, 2, 8), None),
}
# Relative to the largest entry. The same sums in another order: float64 and float32 rounding times the square
# root of at most 1100 terms; bfloat16 rounds q, k, v, the weights and the result once each, 2^-8 a time.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 4 * 2.0**-8}
KERNELS = ("cpu", "reference", "auto")


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    b, s, n, k, h = case.shape
    shapes = ((b, s, n, h), (b, s, k, h), (b, s, k, h))
    q, k_, v = (normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    return q, k_, v


def row_edges(case: Case) -> list[int]:
    b, s = case.shape[:2]
    return list(range(0, b * s + 1, s)) if case.edges is None else case.edges


def cu(case: Case) -> Tensor | None:
    return None if case.edges is None else torch.tensor(case.edges, dtype=torch.int32)


def value_and_grads(fn: Any, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Output and the gradients of a weighted sum of it."""
    leaves = [t.clone().requires_grad_() for t in x]
    out = fn(*leaves)
    weight = normal(*out.shape, seed=9, dtype=out.dtype)
    return (out.detach(), *torch.autograd.grad((out * weight).sum(), leaves))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_dense(name: str, dtype: torch.dtype, causal: bool) -> None:
    # cases D30, P24, P25, P26, H54
    case = CASES[name]
    if case.shape[1] > 1000 and dtype != torch.float64:
        return  # the long ones add nothing here
    x = inputs(case, dtype)
    edges = row_edges(case)
    want = value_and_grads(
        lambda q, k, v: dense_attention(q, k, v, edges=edges, causal=causal), tuple(t.double() for t in x)
    )
    for kernel in KERNELS:
        got = value_and_grads(
            lambda q, k, v, kernel=kernel: attention(
                q, k, v, cu_seqlens=cu(case), causal=causal, kernel=kernel
            ),
            x,
        )
        for g, w, what in zip(got, want, ("out", "dq", "dk", "dv"), strict=True):
            assert g.dtype == dtype  # case P40
            # a document of one token has no gradient for q and k; then compare with the inputs' scale of 1
            error = (g.double() - w).abs().max() / max(float(w.abs().max()), 1.0)
            assert error <= TOLERANCE[dtype], (kernel, what, float(error))


def test_scale_and_half_precision() -> None:
    q, k, v = inputs(CASES["packed"], torch.float16)
    out = attention(q, k, v, cu_seqlens=cu(CASES["packed"]), scale=0.1)  # no kernel takes it: the reference
    want = dense_attention(q.double(), k.double(), v.double(), edges=row_edges(CASES["packed"]), scale=0.1)
    assert out.dtype == torch.float16
    assert (out.double() - want).abs().max() <= 2 * 2.0**-11 * want.abs().max()  # rounded once from float32


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_documents_do_not_see_each_other(kernel: str) -> None:
    # cases H29, D30, D36: a change in one document changes nothing, to the last bit, in any other
    case = CASES["packed"]
    x = inputs(case)

    def run(x: tuple[Tensor, ...]) -> list[Tensor]:
        results = value_and_grads(lambda q, k, v: attention(q, k, v, cu_seqlens=cu(case), kernel=kernel), x)
        return [t.flatten(0, 1) for t in results]

    before = run(x)
    for start, stop in pairwise(case.edges or []):
        changed = tuple(t.clone() for t in x)
        for t in changed:
            t.flatten(0, 1)[start:stop] += normal(stop - start, *t.shape[2:], seed=5)
        for old, new in zip(before, run(changed), strict=True):
            outside = torch.ones(len(old), dtype=torch.bool)
            outside[start:stop] = False
            assert torch.equal(old[outside], new[outside])
        assert not torch.equal(before[0][start:stop], run(changed)[0][start:stop])


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_causal_means_causal(kernel: str) -> None:
    x = inputs(CASES["rows"])
    mask = visible(row_edges(CASES["rows"]), causal=True)
    before = attention(*x, kernel=kernel).flatten(0, 1)
    for j in range(len(before)):
        k, v = x[1].clone(), x[2].clone()
        k.flatten(0, 1)[j] += 1
        v.flatten(0, 1)[j] += 1
        changed = (attention(x[0], k, v, kernel=kernel).flatten(0, 1) != before).flatten(1).any(1)
        assert torch.equal(changed, mask[:, j]), j


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_packed_equals_documents_run_alone(kernel: str) -> None:
    # case D30; case H36 and P52: lengths of 3, 1, 3, 2, 5, none a multiple of anything
    case = CASES["packed"]
    x = inputs(case)
    packed = attention(*x, cu_seqlens=cu(case), kernel=kernel).flatten(0, 1)
    for start, stop in pairwise(case.edges or []):
        alone = attention(*(t.flatten(0, 1)[None, start:stop] for t in x), kernel=kernel)
        assert torch.equal(alone[0], packed[start:stop])
