"""Attention under every table, those of the examples and of the tests too, and in cases that nobody chose."""

from __future__ import annotations

import random

import pytest

from tests.mesh.cases import Sizes
from tests.pool import Pool
from tests.schemes import SCHEMES
from tests.usp.rings import Case, Job, parities
from tests.usp.test_ring import ROUNDING
from usp.mesh import Table
from usp.mesh.devices import AXES
from usp.order import ring_degree, unit

PACKED = (0, 1, 7, 24, 30, 31, 48)  # of two rows
CASES = [
    Case((2, 24, 9, 3, 4, 6), PACKED),  # heads that no number of ranks divides, v of its own size
    Case((2, 24, 8, 2, 4, 4), PACKED, False),
    Case((2, 24, 3, 1, 4, 4), None, False, 5, True),  # fewer heads than 4 ranks
    Case((2, 24, 4, 1, 8, 8), PACKED, True, 4, True, 2.0),
]
MESHES: tuple[Sizes, ...] = ((1, 1, 3), (1, 1, 4), (1, 3, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1))


def fits(table: Table, sizes: Sizes) -> bool:
    """Where attention's input is cut over ring, so is attention."""
    return sizes[1] == 1 or table.name != "mine"


def jobs_of(sizes: Sizes, table: Table) -> list[Job]:
    exchanges = ("p2p", "gather") if degree_of(table, sizes) > 1 else ("auto",)
    return [Job(sizes, CASES, exchange=exchange, table=table.name) for exchange in exchanges]


def degree_of(table: Table, sizes: Sizes) -> int:
    return ring_degree(table, dict(zip(AXES, sizes, strict=True)))


def check(ranks: Pool, jobs: list[Job], note: str = "") -> int:
    """Run them all in one call; the number of results that were compared."""
    num = 0
    for found in ranks.run(parities, jobs, timeout=400):
        for job, errors in zip(jobs, found, strict=True):
            for index, what, error in errors:
                assert error <= ROUNDING, (note, job._replace(cases=()), job.cases[index], what, error)
            num += len(errors)
    return num


@pytest.mark.parametrize("name", SCHEMES)
def test_every_table_on_every_mesh(name: str, ranks: Pool) -> None:
    # cases H48, H50, H52, P24, P36, P37, P45, P52, P68
    table = SCHEMES[name]
    jobs = [job for sizes in MESHES if fits(table, sizes) for job in jobs_of(sizes, table)]
    assert check(ranks, jobs) >= 3 * 4 * len(CASES) * 4


def any_case(rng: random.Random, table: Table, sizes: Sizes) -> Case:
    """Any heads, sizes, documents and options that this mesh takes."""
    degree = degree_of(table, sizes)
    rows = sizes[0] * rng.randint(1, 2)
    length = unit(degree) * rng.randint(1, max(1, 24 // unit(degree)))
    kv, group = rng.randint(1, 4), rng.randint(1, 4)
    inner = rng.sample(range(1, rows * length), min(rng.randint(0, 6), rows * length - 1))
    edges = tuple(sorted({*range(0, rows * length + 1, length), *inner}))
    size = rng.choice((2, 3, 8))
    return Case(
        shape=(rows, length, kv * group, kv, size, rng.choice((size, 1, 5))),
        edges=rng.choice((None, edges)),
        causal=rng.random() < 0.6,
        window=rng.choice((None, rng.randint(1, length + 2))),
        sinks=rng.random() < 0.4,
        softcap=rng.choice((None, None, 2.0)),
    )


def any_jobs(seed: int, meshes: tuple[Sizes, ...], num: int) -> list[Job]:
    rng = random.Random(seed)
    jobs = []
    for _ in range(num):
        sizes = rng.choice(meshes)
        table = SCHEMES[rng.choice([n for n, t in SCHEMES.items() if fits(t, sizes)])]
        kernel = rng.choice(("auto", "tiled", "tiled", "reference"))
        case = any_case(rng, table, sizes)
        free = degree_of(table, sizes) > 1 and kernel != "reference"
        exchange = rng.choice(("auto", "p2p", "gather")) if free else "auto"
        jobs.append(Job(sizes, [case], kernel, exchange, table.name))
    return jobs


def test_any_case(ranks: Pool) -> None:
    assert check(ranks, any_jobs(1, MESHES, 150), "seed=1") > 150 * 4 * 2
