"""Attention on 8 ranks: every way to split them between ring and heads; errors flat in the ring's degree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.mesh.cases import Sizes
from tests.ranks import run_ranks
from tests.usp.rings import Case, parity
from tests.usp.test_ring import ROUNDING

PACKED = [0, 1, 7, 30, 31, 48]  # documents shorter than the ranks, one over most of them
CASES = [
    Case((1, 48, 9, 3, 8, 8), PACKED),
    Case(
        (2, 16, 3, 1, 4, 6), None, True, None, True
    ),  # fewer heads than ranks: cases H48, H50, H52, P49, P68
    Case((1, 48, 28, 4, 4, 4), PACKED, True, 11),  # 28 heads on 8 ranks
    Case((1, 48, 8, 2, 8, 8), PACKED, False, None, False, 2.0),
    Case((3, 16, 16, 2, 4, 4), None, False, 5, True),
]
SPLITS: list[Sizes] = [(1, 8, 1), (1, 4, 2), (1, 2, 4), (1, 1, 8), (2, 2, 2)]


def every_split(rank: int, world: int) -> list[Any]:
    found = []
    for sizes in SPLITS:
        cases = [c for c in CASES if c.shape[1] % (2 * sizes[1] * sizes[2]) == 0] if sizes[0] == 1 else []
        found.append([(cases[i], *rest) for i, *rest in parity(sizes, cases, "tiled", "auto")])
    return found


def by_degree(rank: int, world: int) -> list[float]:
    """Largest relative error of the gradients in bfloat16, for rings of 1, 2, 4 and 8."""
    worst = []
    for ring in (1, 2, 4, 8):
        cases, way = [Case((1, 256, 2, 1, 16, 16))], "p2p" if ring > 1 else "auto"
        errors = parity((1, ring, 1), cases, "tiled", way, torch.bfloat16)
        worst.append(max((e for _, what, e in errors if what != "out"), default=0.0))
    return worst


def both(rank: int, world: int) -> tuple[list[Any], list[float]]:
    return every_split(rank, world), by_degree(rank, world)


@pytest.fixture(scope="module")
def results() -> list[tuple[list[Any], list[float]]]:
    return run_ranks(both, 8, timeout=400)


def test_every_split_of_eight_ranks(results: list[tuple[list[Any], list[float]]]) -> None:
    for by_split, _ in results:
        assert sum(map(len, by_split)) > 60
        for sizes, errors in zip(SPLITS, by_split, strict=True):
            for case, what, error in errors:
                assert error <= ROUNDING, (sizes, case, what, error)


def test_the_error_of_gradients_is_flat_in_the_degree(results: list[tuple[list[Any], list[float]]]) -> None:
    # cases P34, P41, P46: partial results merged, gradients summed, in float32
    one, *more = (max(column) for column in zip(*(worst for _, worst in results), strict=True))
    # bfloat16 rounds by 2^-9 of a number: the output that the gradients are computed from, and each gradient,
    # relative to the largest of numbers of both signs
    assert 0 < one < 4 * 2.0**-8
    for error in more:
        assert error < 1.5 * one, (one, more)
