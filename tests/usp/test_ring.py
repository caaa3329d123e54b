"""Attention over rings, and rings with heads traded inside, against one dense float64 softmax."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.mesh.cases import Sizes
from tests.pool import Pool
from tests.usp.rings import Case, Job, counts, inputs, parity, want
from usp import attention
from usp.order import pieces, unzigzag, zigzag
from usp.ring import gather_pays, ring_bytes
from usp.spans import Mask, runs

# float64 rounding of sums in another order, over up to 48 terms of size 1, relative to the largest entry
ROUNDING = 1e-13
SHAPES = ((2, 24, 4, 2, 8, 8), (1, 24, 9, 3, 4, 6), (1, 48, 2, 1, 8, 8))
# documents of one token, shorter than the ranks, across chunks, ending where chunks end
EDGES = {24: ([0, 24], [0, 5, 6, 17, 24], [0, 6, 12, 18, 24]), 48: ([0, 1, 3, 40, 48], [0, 48])}


def all_cases() -> list[Case]:
    """Every combination of documents, direction and window, with and without sinks and soft cap by turns."""
    cases = []
    for index, (shape, causal, window) in enumerate(product(SHAPES, (True, False), (None, 1, 4, 13))):
        for which, edges in enumerate((None, *EDGES[shape[1]])):
            starts = range(0, shape[0] * shape[1], shape[1])
            rows = None if edges is None else tuple(sorted({start + e for start in starts for e in edges}))
            extra = (index + which) % 4
            cases.append(Case(shape, rows, causal, window, extra in (1, 3), 3.0 if extra > 1 else None))
    return cases


def every_option() -> list[Case]:
    """The full product of what a case can ask for, on one small shape."""
    edges = ((0, 12), (0, 1, 2, 9, 12), (0, 3, 6, 9, 12))
    options = product(edges, (True, False), (None, 1, 5), (False, True), (None, 3.0))
    return [Case((1, 12, 3, 1, 4, 6), *option) for option in options]


MESHES: tuple[Sizes, ...] = ((1, 2, 1), (1, 4, 1), (1, 2, 2), (1, 3, 1), (1, 1, 4), (1, 1, 2))


@pytest.mark.parametrize("exchange", ["p2p", "gather"])
@pytest.mark.parametrize("sizes", [m for m in MESHES if m[1] > 1], ids=str)
def test_every_mask(sizes: Sizes, exchange: str, ranks: Pool) -> None:
    # cases H29, H34, H36, H40, P24, P36, P37, P46, P53, P54, D30, D32
    cases = all_cases()
    for errors in ranks.run(parity, Job(sizes, cases, "tiled", exchange), timeout=400):
        for index, what, error in errors:
            assert error <= ROUNDING, (cases[index], what, error)


@pytest.mark.parametrize(("sizes", "exchange"), [((1, 3, 1), "p2p"), ((1, 2, 2), "gather")], ids=str)
def test_every_option_with_every_other(sizes: Sizes, exchange: str, ranks: Pool) -> None:
    cases = every_option()
    assert len(set(cases)) == 72
    for errors in ranks.run(parity, Job(sizes, cases, "tiled", exchange), timeout=400):
        for index, what, error in errors:
            assert error <= ROUNDING, (cases[index], what, error)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_other_kernels(sizes: Sizes, kernel: str, ranks: Pool) -> None:
    cases = all_cases()[::5]
    for errors in ranks.run(parity, Job(sizes, cases, kernel), timeout=400):
        for index, what, error in errors:
            assert error <= ROUNDING, (cases[index], what, error)


def test_collectives_are_those_of_the_docstring(ranks: Pool) -> None:
    case = Case((1, 24, 4, 2, 8, 8))
    for forward, backward in ranks.run(counts, (1, 4, 1), case, "p2p"):
        assert forward == {"all_to_all": 3}  # to the next rank, 3 times
        assert backward == {"all_to_all": 3 + 4}  # keys 3 times, their gradients 4
    for forward, backward in ranks.run(counts, (1, 4, 1), case, "gather"):
        assert forward == {"all_gather": 1}
        assert backward == {"all_gather": 1, "reduce_scatter": 1}


def test_bytes_of_both_ways() -> None:
    # 1000 elements of k and v, bfloat16, 4 ranks: 3 hops of 2 bytes twice, and 4 hops of 4 bytes
    assert ring_bytes(1000, 2, 4) == (28_000, 24_000)
    assert ring_bytes(1000, 8, 1) == (0, 0)
    assert gather_pays(32, 8, 4)
    assert not gather_pays(32, 8, 8)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_visible_pair_is_in_one_run(data: st.DataObject) -> None:
    """Runs of all ranks together cover exactly the pairs that may meet, each once. Any sizes, no kernel."""
    degree = data.draw(st.integers(1, 4))
    chunk = data.draw(st.integers(1, 5))
    seq_len = chunk if degree == 1 else 2 * degree * chunk
    num_rows = data.draw(st.integers(1, 3))
    inner = st.sets(st.integers(1, max(1, num_rows * seq_len - 1)), max_size=6)
    edges = sorted({*range(0, num_rows * seq_len + 1, seq_len), *data.draw(inner)})
    causal, window = data.draw(st.booleans()), data.draw(st.none() | st.integers(1, seq_len + 2))
    mask = Mask(tuple(edges), num_rows, seq_len, causal, window, 1.0, 0.0, degree)
    total = num_rows * seq_len
    times = torch.zeros(total, total, dtype=torch.int64)
    for rank, source in product(range(degree), repeat=2):
        mine, theirs = (_natural(mask, r) for r in (rank, source))
        for run in runs(mask, rank, source):
            segments = run.segments
            for i in range(len(segments.cu_q) - 1):
                q = mine[run.q[0] + segments.cu_q[i] : run.q[0] + segments.cu_q[i + 1]]
                k = theirs[run.k[0] + segments.cu_k[i] : run.k[0] + segments.cu_k[i + 1]]
                shift = torch.arange(len(k))[None] - torch.arange(len(q))[:, None] - (len(k) - len(q))
                band = torch.ones_like(shift, dtype=torch.bool)
                band &= shift >= -segments.left if segments.left is not None else True
                band &= shift <= segments.right if segments.right is not None else True
                assert band.any(1).all()  # no row without a key
                times[q[:, None], k[None]] += band.long()
    at = torch.arange(total)
    document = torch.bucketize(at, torch.tensor(edges[1:]), right=True)
    ahead = at[None] - at[:, None]
    seen = document[None] == document[:, None]
    seen &= ahead <= 0 if causal else True
    seen &= ahead.abs() < window if window is not None else True
    assert torch.equal(times, seen.long())


def _natural(mask: Mask, rank: int) -> Tensor:
    """Position over all rows of each local row of a ring rank."""
    held = [torch.arange(start, start + n) for start, n in pieces(mask.seq_len, mask.ring, rank)]
    return torch.cat([row * mask.seq_len + t for row in range(mask.num_rows) for t in held])


@given(st.integers(1, 5), st.integers(1, 4))
def test_order_and_its_inverse(degree: int, chunk: int) -> None:
    # case P42
    x = torch.arange(2 * degree * chunk)[None] * 3
    assert torch.equal(unzigzag(zigzag(x, degree, dim=1), degree, dim=1), x)
    every = [piece for i in range(degree) for piece in pieces(x.shape[1], degree, i)]
    held = torch.cat([torch.arange(start, start + n) for start, n in every])
    assert torch.equal(zigzag(x, degree, dim=1)[0], x[0, held])


def test_causal_work_is_the_same_on_every_rank() -> None:
    # cases P38: dense causal attention over 8 ranks
    mask = Mask((0, 1024), 1, 1024, True, None, 1.0, 0.0, 8)
    work = []
    for rank in range(8):
        pairs = 0
        for source in range(8):
            for run in runs(mask, rank, source):
                for i in range(len(run.segments.cu_q) - 1):
                    nq = run.segments.cu_q[i + 1] - run.segments.cu_q[i]
                    nk = run.segments.cu_k[i + 1] - run.segments.cu_k[i]
                    pairs += nq * nk if run.segments.right is None else nq * (nq + 1) // 2
        work.append(pairs)
    assert len(set(work)) == 1
    assert sum(work) == 1024 * 1025 // 2


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors of a few hundred numbers: threads cost more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_one_process_takes_every_mask(one_thread: None) -> None:
    cases = all_cases()
    for case, kernel in product(cases, ("tiled", "reference")):
        x, up = inputs(case)
        leaves = [t.requires_grad_() for t in x]
        cu = None if case.edges is None else torch.tensor(case.edges, dtype=torch.int32)
        sinks = leaves[3] if case.sinks else None
        out = attention(
            *leaves[:3], cu_seqlens=cu, causal=case.causal, window=case.window, sinks=sinks,
            softcap=case.softcap, kernel=kernel,
        )  # fmt: skip
        for g, w in zip([out, *torch.autograd.grad(out, leaves, up)], want(case), strict=True):
            assert (g - w).abs().max() <= ROUNDING * max(1.0, float(w.abs().max())), (case, kernel)
