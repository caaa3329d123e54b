"""What one rank does in the tests of attention over several ranks; the whole sequence beside it, dense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.comm import Comm
from tests.mesh.cases import Sizes, mesh_of, outside
from tests.schemes import SCHEMES
from tests.usp.dense import normal
from usp import attention, heads_to_seq, seq_to_heads
from usp.deal import Deal, deal_heads, with_equal_groups
from usp.mesh import axis_sizes, coordinates

SAME = 3  # kinds of keys where scores are large


class Case(NamedTuple):
    """B, S, N, K, H, Hv; documents as boundaries over the B rows laid end to end, None: whole rows.

    `score`: scores are of this size, and every third key is the same one, so that the largest score of a row
    is met on every rank.
    """

    shape: tuple[int, int, int, int, int, int]
    edges: tuple[int, ...] | None = None
    causal: bool = True
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    score: float | None = None


class Job(NamedTuple):
    """Cases that one table and mesh run; `exchange` and `kernel` as in `usp.attention`."""

    sizes: Sizes
    cases: Sequence[Case]
    kernel: str = "tiled"
    exchange: str = "auto"
    table: str = "usp"
    dtype: torch.dtype = torch.float64
    device: str = "cpu"


Error = tuple[int, str, float]
"""(case, what, error relative to the largest entry) of something that a rank holds."""


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Whole q, k, v (and sinks), and the gradient of the output, in float64, rounded to `dtype` before."""
    b, s, n, k, h, hv = case.shape
    shapes: list[tuple[int, ...]] = [(b, s, n, h), (b, s, k, h), (b, s, k, hv)] + [(n,)] * case.sinks
    x = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    if case.score:
        x[0] *= case.score
        x[1] = x[1][:, torch.arange(s) % SAME]
    return [t.to(dtype).double() for t in x], normal(b, s, n, hv, seed=9, dtype=dtype).double()


def dense(case: Case, x: Sequence[Tensor]) -> Tensor:
    """[T, T] scores written out: every pair of tokens looked at by itself."""
    b, s, n, k, h, hv = case.shape
    edges = case.edges or range(0, b * s + 1, s)
    at = torch.arange(b * s)
    document = torch.bucketize(at, torch.tensor(list(edges[1:])), right=True)
    ahead = at[None, :] - at[:, None]
    seen = document[None, :] == document[:, None]
    if case.causal:
        seen &= ahead <= 0
    if case.window is not None:
        seen &= ahead.abs() < case.window
    outs = []
    for head in range(n):
        q, key, value = (
            t[:, :, i].reshape(b * s, -1)
            for t, i in zip(x[:3], (head, head * k // n, head * k // n), strict=True)
        )
        scores = q @ key.T / math.sqrt(h)
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        scores = scores.masked_fill(~seen, -math.inf)
        # less the largest of a row: no exponential above 1
        top = scores.amax(1, keepdim=True).detach()
        if case.sinks:
            top = top.maximum(x[3][head].detach())
        weights = (scores - top).exp()
        total = weights.sum(1, keepdim=True)
        if case.sinks:
            total = total + (x[3][head] - top).exp()
        outs.append((weights / total @ value).view(b, s, hv))
    return torch.stack(outs, 2)


@lru_cache(maxsize=1024)  # the same cases run on many meshes
def want(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Output and all gradients of the whole."""
    x, up = inputs(case, dtype)
    leaves = [t.requires_grad_() for t in x]
    out = dense(case, leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, up)]


class Place:
    """Which rows, tokens and heads this rank has where a table projects q, k and v."""

    def __init__(self, table: str, mesh: Any) -> None:
        self.table, self.mesh = SCHEMES[table], mesh
        self.sizes, self.at = axis_sizes(mesh), coordinates(mesh)
        self.ring = self.ways(self.table.q[1])
        self.by_head = self.ways(self.table.use["wq"][0]) > 1

    def ways(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[a] for a in axes)

    def index(self, axes: Sequence[str]) -> int:
        found = 0
        for axis in axes:
            found = found * self.sizes[axis] + self.at[axis]
        return found

    def tokens(self, t: Tensor) -> Tensor:
        """Of [B, S, ...]: own rows; of a ring the r-th chunk from the front and the r-th from the back."""
        rows, columns = self.table.attn_x.dims[:2]
        t = t.chunk(self.ways(rows), 0)[self.index(rows)]
        if self.ring > 1:
            cut = t.chunk(2 * self.ring, 1)
            t = torch.cat([cut[i] for r in range(self.ring) for i in (r, 2 * self.ring - 1 - r)], 1)
        for axis in columns:
            step = -(-t.shape[1] // self.sizes[axis])
            t = t[:, step * self.at[axis] : step * (self.at[axis] + 1)]
        return t

    def edges(self, case: Case) -> Tensor | None:
        """Boundaries in this rank's rows."""
        if case.edges is None:
            return None
        rows = self.table.attn_x[0]
        own = case.shape[0] * case.shape[1] // self.ways(rows)
        start = own * self.index(rows)
        return torch.tensor([e - start for e in case.edges if start <= e <= start + own], dtype=torch.int32)

    def deal(self, case: Case) -> Deal:
        """Own heads while attention runs."""
        axes = self.table.q[2]
        return deal_heads(*case.shape[2:4], self.ways(axes))[self.index(axes)]

    def own(self, t: Tensor, case: Case, *, kv: bool = False) -> Tensor:
        """Of a whole [B, S, N, H], or [B, S, K, H] of `kv`, what this rank projects."""
        t, deal = self.tokens(t), self.deal(case)
        if not self.by_head:
            return t
        return t[:, :, deal.kv_start : deal.kv_stop] if kv else t[:, :, deal.q_start : deal.q_stop]

    def total(self, t: Tensor, axes: Sequence[str]) -> Tensor:
        for axis in axes:
            dist.all_reduce(t, group=self.mesh.get_group(axis))
        return t


def parity(job: Job) -> list[Error]:
    """Errors of output and gradients; the whole is computed in float64 from inputs rounded to `dtype`."""
    mesh = mesh_of(job.sizes)
    if outside(mesh):
        return []
    place = Place(job.table, mesh)
    errors = []
    for index, case in enumerate(job.cases):
        got, whole = results(place, case, job, *inputs(case, job.dtype)), want(case, job.dtype)
        mine = [place.own(t, case, kv=i > 1) for i, t in enumerate(whole[:4])] + whole[4:]
        for what, g, w, t in zip(("out", "dq", "dk", "dv", "dsinks"), got, mine, whole, strict=False):
            assert g.isfinite().all(), (case, what)
            error = (g.cpu().double() - w).abs().max() / t.abs().max().clamp(min=1.0) if g.numel() else 0.0
            errors.append((index, what, float(error)))
    return errors


def parities(jobs: Sequence[Job]) -> list[list[Error]]:
    return [parity(job) for job in jobs]


def results(place: Place, case: Case, job: Job, x: Sequence[Tensor], up: Tensor) -> list[Tensor]:
    """This rank's part of the output and of the gradients; that of the sinks is whole."""

    def here(t: Tensor) -> Tensor:
        return t.detach().to(job.device, job.dtype, copy=True)

    leaves = [here(place.own(t, case, kv=i > 0)) for i, t in enumerate(x[:3])] + [here(t) for t in x[3:]]
    for leaf in leaves:
        leaf.requires_grad_()
    deal, num_heads, seq = place.deal(case), case.shape[2], case.shape[1]
    q, k, v = leaves[:3]
    if place.by_head:
        k, v = with_equal_groups(k, v, deal, num_heads // case.shape[3])
    q, k, v = seq_to_heads(q, k, v, mesh=place.mesh, table=place.table, seq_len=seq)
    out = attention(
        q, k, v,
        table=place.table, mesh=place.mesh, causal=case.causal, window=case.window, softcap=case.softcap,
        cu_seqlens=place.edges(case), sinks=leaves[3][deal.q_start : deal.q_stop] if case.sinks else None,
        kernel=job.kernel, exchange=job.exchange,  # type: ignore[arg-type]
    )  # fmt: skip
    out = heads_to_seq(out, num_heads=num_heads, mesh=place.mesh, table=place.table, seq_len=seq)
    grads = list(torch.autograd.grad(out, leaves, here(place.own(up, case))))
    assert all(t.dtype == job.dtype for t in (out, *grads))  # case P40
    if place.by_head:  # ranks that share a kv head have one summand of its gradient each
        for i in (1, 2):
            total = torch.zeros_like(place.tokens(x[i]), device=job.device)
            total[:, :, deal.kv_start : deal.kv_stop] = grads[i]
            total = place.total(total, place.table.use["wq"][0])
            grads[i] = total[:, :, deal.kv_start : deal.kv_stop]
    if case.sinks:  # every rank's heads and tokens
        grads[3] = place.total(grads[3].double(), [a for dim in place.table.q.dims for a in dim])
    return [out.detach(), *grads]


def counts(sizes: Sizes, case: Case, exchange: str) -> list[dict[str, int]]:
    """Collectives of attention alone, forward and backward."""
    place = Place("ring", mesh_of(sizes))
    x, up = inputs(case)
    local = [place.tokens(t).clone().requires_grad_() for t in x[:3]]
    found = []
    with Comm() as comm:
        out = attention(*local, table=place.table, mesh=place.mesh, exchange=exchange)  # type: ignore[arg-type]
        found.append(comm.kinds())
    with Comm() as comm:
        torch.autograd.grad(out, local, place.tokens(up))
        found.append(comm.kinds())
    return found
