"""Documents do not see each other on any mesh, and a ring attends in the order that `shard_batch` deals."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.mesh.cases import Sizes, mesh_of
from tests.pool import Pool
from tests.usp.dense import normal
from tests.usp.rings import Case, Job, Place, inputs, results, want
from tests.usp.test_ring import ROUNDING
from usp import Batch, attention, heads_to_seq, seq_to_heads, shard_batch, unshard_batch

# a document of one token, one that ends where a chunk does, one over most ranks; of 4 heads, 1 or 2 on a rank
EDGES = (0, 1, 6, 7, 22, 24, 33, 48)
RUNS: tuple[Job, ...] = (
    Job((1, 4, 1), (), "tiled", "p2p"),
    Job((1, 4, 1), (), "auto", "gather"),
    Job((1, 2, 2), (), "auto", "p2p"),
    Job((1, 2, 2), (), "tiled", "gather", "ring_tp"),
    Job((1, 1, 4), (), "auto"),
    Job((1, 1, 4), (), "tiled", table="tp_sp"),
)


def changed_by_document(job: Job) -> list[tuple[int, int, int]]:
    """For each change of one document: (its entries here that changed, those of others, those of others that
    changed), over output and gradients."""
    case = Case((2, 24, 4, 2, 8, 8), EDGES)
    place = Place(job.table, mesh_of(job.sizes))
    x, up = inputs(case)
    at = place.tokens(torch.arange(48).view(2, 24))
    before = results(place, case, job, x, up)
    found = []
    for start, stop in pairwise(EDGES):
        other = [t.clone() for t in (*x, up)]
        for t in other:
            t.flatten(0, 1)[start:stop] += normal(stop - start, *t.shape[2:], seed=5)
        after = results(place, case, job, other[:3], other[3])
        inside = (at >= start) & (at < stop)
        pairs = [(a != b).flatten(2).any(2) for a, b in zip(before, after, strict=True)]
        found.append((
            sum(int(p[inside].sum()) for p in pairs),
            int((~inside).sum()),
            sum(int(p[~inside].sum()) for p in pairs),
        ))  # fmt: skip
    return found


@pytest.mark.parametrize("job", RUNS, ids=lambda j: f"{j.sizes} {j.table} {j.exchange}")
def test_no_document_reaches_another(job: Job, ranks: Pool) -> None:
    # cases H29, P52, D30: to the last bit, values and gradients
    by_rank = ranks.run(changed_by_document, job)
    for document in zip(*by_rank, strict=True):
        changed, others, leaked = (sum(column) for column in zip(*document, strict=True))
        assert changed > 0
        assert others > 0
        assert leaked == 0


def dealt_by_shard_batch(table: str, sizes: Sizes) -> list[float]:
    """Errors of output, dq, dk, dv of whole rows, cut and put together by nobody but the library."""
    place = Place(table, mesh_of(sizes))
    mesh, scheme = place.mesh, place.table
    case = Case((2, 21, 6, 2, 4, 4), (0, 1, 9, 21, 26, 42))  # no multiple of any mesh
    x, up = inputs(case)
    number = torch.arange(1, 43).view(2, 21)
    shard = shard_batch(Batch(number, cu_seqlens=[[0, 1, 9, 21], [0, 5, 21]]), table=scheme, mesh=mesh)
    real = (shard.tokens > 0)[..., None, None]
    leaves = [t.requires_grad_() for t in x]

    def own(t: Tensor) -> Tensor:
        return t.flatten(0, 1)[(shard.tokens - 1).clamp(min=0)] * real

    placed = {"mesh": mesh, "table": scheme}
    seq = shard.seq_len
    q, k, v = seq_to_heads(*(own(t) for t in leaves), **placed, seq_len=seq)  # type: ignore[arg-type]
    o = attention(q, k, v, **placed, cu_seqlens=shard.cu_seqlens)  # type: ignore[arg-type]
    o = heads_to_seq(o, num_heads=6, **placed, seq_len=seq)  # type: ignore[arg-type]
    grads = torch.autograd.grad(o, leaves, own(up))
    got = [unshard_batch(o.detach(), shard, table=scheme, mesh=mesh)]
    got += [place.total(g, [a for dim in scheme.tokens.dims for a in dim]) for g in grads]
    return [float((g - w).abs().max() / w.abs().max()) for g, w in zip(got, want(case), strict=True)]


@pytest.mark.parametrize(
    ("table", "sizes"),
    [
        ("ring", (1, 4, 1)), ("ring", (2, 2, 1)), ("usp", (1, 2, 2)), ("swapped", (1, 2, 2)),
        ("swapped", (1, 1, 4)), ("ulysses", (1, 1, 4)),
    ],
)  # fmt: skip
def test_the_order_of_shard_batch(table: str, sizes: Sizes, ranks: Pool) -> None:
    # case P42: the one order in which a batch is dealt is that in which a ring attends
    for errors in ranks.run(dealt_by_shard_batch, table, sizes):
        assert len(errors) == 4
        assert max(errors) <= ROUNDING
