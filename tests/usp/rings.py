"""What one rank does in the tests of attention over several ranks; the whole sequence beside it, dense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.mesh.cases import Sizes, mesh_of, outside
from tests.usp.dense import normal
from usp import attention, heads_to_seq, seq_to_heads
from usp.mesh import TABLES, coordinates


class Case(NamedTuple):
    """B, S, N, K, H, Hv; documents as boundaries over the B rows laid end to end, None: whole rows."""

    shape: tuple[int, int, int, int, int, int]
    edges: list[int] | None = None
    causal: bool = True
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Whole q, k, v (and sinks), and the gradient of the output, in float64, rounded to `dtype` before."""
    b, s, n, k, h, hv = case.shape
    shapes: list[tuple[int, ...]] = [(b, s, n, h), (b, s, k, h), (b, s, k, hv)] + [(n,)] * case.sinks
    x = [normal(*shape, seed=i, dtype=dtype).double() for i, shape in enumerate(shapes)]
    return x, normal(b, s, n, hv, seed=9, dtype=dtype).double()


def dense(case: Case, x: Sequence[Tensor]) -> Tensor:
    """[T, T] scores written out: every pair of tokens looked at by itself."""
    b, s, n, k, h, hv = case.shape
    edges = case.edges or list(range(0, b * s + 1, s))
    at = torch.arange(b * s)
    document = torch.bucketize(at, torch.tensor(edges[1:]), right=True)
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
        top = scores.masked_fill(~seen, -math.inf).exp()
        total = top.sum(1, keepdim=True)
        if case.sinks:
            total = total + x[3][head].exp()
        outs.append((top / total @ value).view(b, s, hv))
    return torch.stack(outs, 2)


def want(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Output and all gradients of the whole."""
    x, up = inputs(case, dtype)
    leaves = [t.requires_grad_() for t in x]
    out = dense(case, leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, up)]


def chunks(t: Tensor, ring: int, ulysses: int, r: int, u: int) -> Tensor:
    """Tokens of rank (r, u): of the r-th chunk from the front and the r-th from the back, 1 / ulysses."""
    if ring > 1:
        cut = t.chunk(2 * ring, 1)
        t = torch.cat([cut[r], cut[2 * ring - 1 - r]], 1)
    return t.chunk(ulysses, 1)[u]


def parity(
    sizes: Sizes,
    cases: Sequence[Case],
    kernel: str,
    exchange: str,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> list[tuple[int, str, float]]:
    """(case, what, error relative to the largest entry) of everything this rank holds.

    The whole is computed in float64 from inputs rounded to `dtype`.
    """
    mesh = mesh_of(sizes)
    if outside(mesh):
        return []
    table, at = TABLES["usp"], coordinates(mesh)
    errors = []
    for index, case in enumerate(cases):
        x, up = inputs(case, dtype)
        whole = want(case, dtype)
        place = (sizes[1], sizes[2], at["ring"], at["ulysses"])
        local = [chunks(t, *place).to(device, dtype, copy=True).requires_grad_() for t in x[:3]]
        sinks = x[3].to(device, dtype, copy=True).requires_grad_() if case.sinks else None
        seq = case.shape[1]
        q, k, v = seq_to_heads(*local, mesh=mesh, table=table, seq_len=seq)
        first = sum(t.shape[0] for t in torch.arange(case.shape[2]).tensor_split(sizes[2])[: at["ulysses"]])
        out = attention(
            q, k, v,
            table=table, mesh=mesh, causal=case.causal, window=case.window, softcap=case.softcap,
            cu_seqlens=None if case.edges is None else torch.tensor(case.edges, dtype=torch.int32),
            sinks=None if sinks is None else sinks[first : first + q.shape[2]],
            kernel=kernel, exchange=exchange,  # type: ignore[arg-type]
        )  # fmt: skip
        out = heads_to_seq(out, num_heads=case.shape[2], mesh=mesh, table=table, seq_len=seq)
        leaves = local if sinks is None else [*local, sinks]
        grads = list(torch.autograd.grad(out, leaves, chunks(up, *place).to(device, dtype)))
        assert all(g.dtype == dtype for g in (out, *grads))  # case P40
        got = [out.detach(), *grads[:3]]
        expected = [chunks(t, *place) for t in whole[:4]]
        if sinks is not None:
            total = grads[3].clone()
            for axis in ("ring", "ulysses"):
                dist.all_reduce(total, group=mesh.get_group(axis))  # every rank's heads and tokens
            got, expected = [*got, total], [*expected, whole[4]]
        for what, g, w, t in zip(("out", "dq", "dk", "dv", "dsinks"), got, expected, whole, strict=False):
            g = g.cpu().double()
            error = (g - w).abs().max() / t.abs().max().clamp(min=1.0) if g.numel() else 0.0
            errors.append((index, what, float(error)))
    return errors


def counts(sizes: Sizes, case: Case, exchange: str) -> list[dict[str, int]]:
    """Collectives of attention alone, forward and backward."""
    mesh = mesh_of(sizes)
    x, up = inputs(case)
    at = coordinates(mesh)
    local = [chunks(t, sizes[1], 1, at["ring"], 0).clone().requires_grad_() for t in x[:3]]
    found = []
    with CommDebugMode() as comm:
        out = attention(*local, table=TABLES["ring"], mesh=mesh, exchange=exchange)  # type: ignore[arg-type]
        found.append(_named(comm))
    with CommDebugMode() as comm:
        torch.autograd.grad(out, local, chunks(up, sizes[1], 1, at["ring"], 0))
        found.append(_named(comm))
    return found


def _named(comm: Any) -> dict[str, int]:
    return {str(op).rpartition(".")[2]: n for op, n in comm.get_comm_counts().items() if n}
