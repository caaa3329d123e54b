"""What a ring does to numbers: scores whose exponentials overflow, and every narrow type."""

from __future__ import annotations

import pytest
import torch

from tests.mesh.cases import Sizes
from tests.pool import Pool
from tests.usp.rings import Case, Job, inputs, parity

MESHES: tuple[Sizes, ...] = ((1, 4, 1), (1, 2, 2))
# Relative to the largest entry. float32: the same sums in another order, over 48 terms. The others round the
# result, from which the gradients are computed too, each rank's part of a gradient, whose terms are larger
# than their sum, and the sum of the parts.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 8 * 2.0**-11, torch.bfloat16: 8 * 2.0**-8}
SIZES = (20.0, 200.0, 2000.0)  # of scores; the largest of them are six times that


def large(score: float) -> list[Case]:
    """Scores of this size, the largest of a row met on every rank: e to 89 is beyond float32."""
    packed = (0, 1, 9, 24, 30, 48)
    return [
        Case((2, 24, 4, 2, 8, 8), score=score),
        Case((2, 24, 4, 2, 8, 8), packed, False, score=score),
        Case((2, 24, 3, 1, 8, 8), packed, True, 11, True, score=score),
    ]


@pytest.mark.parametrize("exchange", ["p2p", "gather"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_large_scores(sizes: Sizes, dtype: torch.dtype, exchange: str, ranks: Pool) -> None:
    # case P41
    for score in SIZES:
        cases = large(score)
        # A score and a log-sum-exp in float32 are known to 2^-24 of their size; their difference is the
        # logarithm of a weight. Three times that for the products, their sum and the merge.
        largest = max(_largest_score(case, dtype) for case in cases)
        assert largest > 100
        tolerance = 3 * largest * 2.0**-24 + TOLERANCE[dtype]
        for errors in ranks.run(parity, Job(sizes, cases, "tiled", exchange, dtype=dtype)):
            assert errors
            for index, what, error in errors:
                assert error <= tolerance, (cases[index], what, error, tolerance)


def _largest_score(case: Case, dtype: torch.dtype) -> float:
    (q, k, *_), _ = inputs(case, dtype)
    group = case.shape[2] // case.shape[3]
    scores = torch.einsum("bqnh,bknh->bnqk", q, k.repeat_interleave(group, 2)) / case.shape[4] ** 0.5
    return float(scores.abs().max())


@pytest.mark.parametrize("exchange", ["p2p", "gather"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_type(dtype: torch.dtype, exchange: str, ranks: Pool) -> None:
    # case P40; gradients in the type of their inputs is asserted beside
    cases = [Case((2, 24, 4, 2, 8, 8)), Case((2, 24, 9, 3, 4, 6), (0, 1, 9, 24, 30, 48), False, 7, True, 3.0)]
    for sizes in MESHES:
        for errors in ranks.run(parity, Job(sizes, cases, "tiled", exchange, dtype=dtype)):
            assert errors
            for index, what, error in errors:
                assert error <= TOLERANCE[dtype], (cases[index], what, error)
