"""Attention and batches on 5 to 8 ranks: every way to split them; errors flat in the ring's degree."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from tests.mesh.cases import Sizes, mesh_of, outside
from tests.pool import Pool, pool_of
from tests.schemes import SCHEMES
from tests.usp.rings import Case, Job, Place, inputs, results, want
from tests.usp.test_data import assert_put_together, every_batch
from tests.usp.test_tables import any_jobs, check, degree_of
from usp.order import unit

PACKED = (0, 1, 7, 30, 31, 48)  # documents shorter than the ranks, one over most of them
CASES = [
    Case((1, 48, 9, 3, 8, 8), PACKED),
    Case(
        (2, 16, 3, 1, 4, 6), None, True, None, True
    ),  # fewer heads than ranks: cases H48, H50, H52, P49, P68
    Case((1, 48, 28, 4, 4, 4), PACKED, True, 11),  # 28 heads on 8 ranks
    Case((1, 48, 8, 2, 8, 8), PACKED, False, None, False, 2.0),
    Case((4, 16, 16, 2, 4, 4), None, False, 5, True),
    Case((1, 48, 30, 10, 4, 4), PACKED, False),  # case P45: 30 heads and 56
    Case((2, 16, 56, 8, 4, 4), (0, 5, 16, 31, 32), True, None, True, 3.0),
]
SPLITS: list[Sizes] = [(1, 8, 1), (1, 4, 2), (1, 2, 4), (1, 1, 8), (2, 2, 2), (2, 1, 4), (2, 4, 1)]
TABLED: list[tuple[str, Sizes]] = [
    *(("usp", sizes) for sizes in ((1, 3, 2), (1, 2, 3), (3, 1, 2))),
    *(("ulysses", (1, 1, n)) for n in (5, 6, 7)),
    *(("ring", (1, n, 1)) for n in (5, 6, 7)),
    *(("odysseus", sizes) for sizes in ((1, 1, 5), (1, 2, 3), (1, 3, 2), (1, 1, 7))),
    *(("mine", (1, 1, n)) for n in (5, 6, 8)),
    *(("tp_sp", sizes) for sizes in ((1, 1, 6), (1, 1, 7), (1, 1, 8), (2, 1, 4))),
    *((table, sizes) for table in ("odysseus", "ring_tp", "swapped") for sizes in ((1, 2, 4), (1, 4, 2))),
    ("swapped", (1, 2, 3)),
]


eight = pool_of(8)


def fitting(cases: list[Case], sizes: Sizes) -> list[Case]:
    return [c for c in cases if c.shape[0] % sizes[0] == 0 and c.shape[1] % (2 * sizes[1]) == 0]


def test_every_split_of_eight_ranks(eight: Pool) -> None:
    jobs = [Job(sizes, fitting(CASES, sizes)) for sizes in SPLITS]
    assert [len(job.cases) for job in jobs] == [7, 7, 7, 7, 3, 3, 3]
    assert check(eight, jobs) == 8 * sum(4 + case.sinks for job in jobs for case in job.cases)


def others(table: str, sizes: Sizes) -> list[Case]:
    """Heads that no such number of ranks divides; uneven lengths where no ring shares them."""
    step = unit(degree_of(SCHEMES[table], sizes))
    length = 31 if step == 1 else 24 // step * step + step
    rows, total = sizes[0], sizes[0] * length
    edges = {*range(0, total + 1, length), 1, 13, 20}
    return [
        Case((rows, length, 7, 7, 4, 6), tuple(sorted(edges)), True, 12),
        Case((rows, length, 9, 3, 4, 4), None, False, None, True, 2.0),
        Case((rows, length, 3, 1, 4, 4), tuple(sorted(edges))),
    ]


def test_five_to_eight_ranks_under_every_table(eight: Pool) -> None:
    # cases H48, H50, H52, P45
    jobs = [Job(sizes, others(table, sizes), table=table) for table, sizes in TABLED]
    ranks = sum(math.prod(sizes) for _, sizes in TABLED)
    assert check(eight, jobs) == ranks * (4 + 5 + 4)


def test_any_case_on_five_to_eight_ranks(eight: Pool) -> None:
    meshes: tuple[Sizes, ...] = (
        (1, 8, 1), (1, 4, 2), (1, 2, 4), (1, 1, 8), (2, 2, 2), (1, 1, 7), (1, 7, 1), (1, 3, 2), (1, 2, 3)
    )  # fmt: skip
    assert check(eight, any_jobs(3, meshes, 60), "seed=3") > 60 * 4 * 5


@pytest.mark.parametrize("sizes", [(1, 2, 4), (1, 4, 2), (2, 2, 2)], ids=str)
def test_batches_put_together(sizes: Sizes, eight: Pool) -> None:
    # case P42
    assert_put_together(eight.run(every_batch, sizes), sizes)


DEGREES = (1, 2, 4, 8)
ROUNDED = [Case((1, 256, 8, 4, 16, 16)), Case((1, 256, 8, 4, 16, 16), (0, 50, 51, 190, 256))]


def by_degree() -> dict[tuple[str, int, str, int], float]:
    """Sum of squared errors in bfloat16 here, by (exchange, case, what, degree)."""
    found = {}
    for way, degree in product(("p2p", "gather"), DEGREES):
        mesh = mesh_of((1, degree, 1))
        if outside(mesh):
            continue
        place, job = Place("ring", mesh), Job((1, degree, 1), (), dtype=torch.bfloat16)
        for index, case in enumerate(ROUNDED):
            chosen = job._replace(exchange=way if degree > 1 else "auto")
            got = results(place, case, chosen, *inputs(case, torch.bfloat16))
            for what, g, w in zip(("out", "dq", "dk", "dv"), got, want(case, torch.bfloat16), strict=True):
                found[way, index, what, degree] = float((g.double() - place.tokens(w)).square().sum())
    return found


def test_the_error_of_gradients_is_flat_in_the_degree(eight: Pool) -> None:
    # cases P34, P41, P46: partial results merged, gradients summed, in float32
    by_rank = eight.run(by_degree)
    for way, index, (i, what) in product(("p2p", "gather"), (0, 1), enumerate(("out", "dq", "dk", "dv"))):
        size = want(ROUNDED[index], torch.bfloat16)[i].square().sum()
        one, *more = (
            math.sqrt(sum(found.get((way, index, what, n), 0.0) for found in by_rank) / size) for n in DEGREES
        )
        # Root mean squares. bfloat16 rounds a number by 2^-9 at most: the result once, and once the output
        # that gradients are computed from. A ring has parts, whatever their number: a part is rounded once,
        # and so is their sum, which makes sqrt(2).
        assert 0 < one < 2.0**-8, (way, index, what)
        assert max(more) < 1.6 * one, (way, index, what, one, more)
