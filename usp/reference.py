"""Attention in plain torch, differentiable to any order and under every torch.func transform."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from usp.mesh import MeshLike, P, Table, coordinates, redistribute
from usp.order import pieces, ring_axes, unzigzag
from usp.spans import Mask

_TILE = 512  # queries at a time, so that no S x S tensor exists


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mask: Mask,
    *,
    table: Table | None,
    mesh: MeshLike | None,
) -> Tensor:
    """`usp.attention` for the shapes and options checked there; the keys of a ring are gathered first.

    Computes in at least float32. Communicates, over the axes of a ring, 1 all-gather each for k and v, and
    the reduce-scatters that are their transposes.
    """
    rank = 0
    if mask.ring > 1:
        assert table is not None
        assert mesh is not None
        axes = ring_axes(table, mesh)
        # [B, S@ring, K, H] -> [B, S, K, H], then from ring order to natural order
        cut, whole = P(None, axes, None, None), P(None, None, None, None)
        k, v = (unzigzag(redistribute(t, cut, whole, mesh), mask.ring, dim=1) for t in (k, v))
        rank = coordinates(mesh)[axes[0]]
    group = q.shape[2] // max(k.shape[2], 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    outs = []
    for row in range(mask.num_rows):
        kr, vr = (t[row].to(wide).repeat_interleave(group, 1) for t in (k, v))
        at = 0
        for start, length in pieces(mask.seq_len, mask.ring, rank):
            rows = q[row, at : at + length].to(wide)
            outs.append(_piece(rows, kr, vr, sinks, mask, row, start))
            at += length
    return torch.cat(outs).view(*q.shape[:3], v.shape[3]).to(q.dtype)


def _piece(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Mask, row: int, start: int) -> Tensor:
    """Queries [L, N, H] at the positions from `start` on, keys and values [S, N, H] of their row."""
    base, stop = row * mask.seq_len, start + q.shape[0]
    edges = [e - base for e in mask.edges if base <= e <= base + mask.seq_len]
    outs = []
    for low, high in pairwise(edges):
        for first in range(max(low, start), min(high, stop), _TILE):
            last = min(first + _TILE, high, stop)
            outs.append(_tile(q[first - start : last - start], k, v, sinks, mask, first, low, high))
    return torch.cat(outs) if outs else v.new_zeros(*q.shape[:2], v.shape[2])


def _tile(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Mask, first: int, low: int, high: int
) -> Tensor:
    """Queries from position `first` on, all in the document [low, high)."""
    last = first + q.shape[0]
    if mask.causal:
        high = min(high, last)
    if mask.window is not None:
        low, high = max(low, first - mask.window + 1), min(high, last + mask.window - 1)
    scores = torch.einsum("qnh,snh->nqs", q, k[low:high]) * mask.scale
    if mask.softcap:
        scores = mask.softcap * torch.tanh(scores / mask.softcap)
    if mask.causal or mask.window is not None:
        ahead = torch.arange(low, high, device=q.device) - torch.arange(
            first, last, device=q.device
        ).unsqueeze(1)
        hidden = ahead > 0 if mask.causal else torch.zeros_like(ahead, dtype=torch.bool)
        if mask.window is not None:
            hidden = hidden | (ahead.abs() >= mask.window)
        scores = scores.masked_fill(hidden, -math.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        extra = sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, q.shape[0], 1)
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    return torch.einsum("nqs,snh->qnh", weights, v[low:high])
