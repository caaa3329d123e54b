"""Kernel "tiled": plain torch, in every type and with every feature, one tile of queries at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from usp.kernels.interface import PACKED, SOFTCAP, V_SIZE, WINDOW, Kernel, Segments

TILE = 512  # queries; a tile's scores are [N, TILE, keys it can see], the only thing larger than the input


class _Tile(NamedTuple):
    """Query rows, the run of key rows that any of them sees, hidden [rows, keys] bool (None: nothing is)."""

    rows: slice
    keys: slice
    hidden: Tensor | None


def _tiles(segments: Segments, device: torch.device) -> Iterator[_Tile]:
    left, right = segments.left, segments.right
    for (q0, q1), (k0, k1) in zip(pairwise(segments.cu_q), pairwise(segments.cu_k), strict=True):
        length_k = k1 - k0
        shift = length_k - (q1 - q0)  # ends are aligned
        assert q0 == q1 or right is None or shift + right >= 0, "a query that sees no key"
        for first in range(0, q1 - q0, TILE):
            last = min(first + TILE, q1 - q0)
            low = 0 if left is None else max(0, first + shift - left)
            high = length_k if right is None else min(length_k, last + shift + right)
            at = torch.arange(first, last, device=device).unsqueeze(1) + shift
            key = torch.arange(low, high, device=device)
            hidden = None
            if right is not None:
                hidden = key > at + right
            if left is not None:
                before = key < at - left
                hidden = before if hidden is None else hidden | before
            yield _Tile(slice(q0 + first, q0 + last), slice(k0 + low, k0 + high), hidden)


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None, segments: Segments) -> tuple[Tensor, Tensor | None]:
    """q [t, K, G, H], k [s, K, H] -> scores [K, G, t, s], and with a soft cap their tanh."""
    scores, capped = torch.einsum("tkgh,skh->kgts", q, k) * segments.scale, None
    if segments.softcap:
        capped = torch.tanh(scores / segments.softcap)
        scores = capped * segments.softcap
    return (scores if hidden is None else scores.masked_fill(hidden, -math.inf)), capped


def _forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Softmax of one tile of queries over all the keys that it sees, in at least float32."""
    (rows, num_heads, _), num_kv = q.shape, k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    q_TKGH = torch.unflatten(q, 1, (num_kv, -1))
    o = q.new_empty(rows, num_heads, v.shape[2])
    lse = q.new_empty(num_heads, rows, dtype=wide)
    for tile in _tiles(segments, q.device):
        k_tile, v_tile = k[tile.keys].to(wide), v[tile.keys].to(wide)
        scores, _ = _scores(q_TKGH[tile.rows].to(wide), k_tile, tile.hidden, segments)
        total = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(total).exp_()
        o[tile.rows] = torch.einsum("kgts,skh->tkgh", weights, v_tile).flatten(1, 2).to(q.dtype)
        lse[:, tile.rows] = total.flatten(0, 1).squeeze(-1)
    return o, lse


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities again from the log-sum-exp, as in FlashAttention (arXiv 2205.14135, algorithm 4)."""
    num_kv = k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    q_TKGH, do_TKGH, o_TKGH = (torch.unflatten(t, 1, (num_kv, -1)) for t in (q, do, o))
    lse_KGT = torch.unflatten(lse, 0, (num_kv, -1))
    dq = torch.empty_like(q_TKGH, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (k, v))
    for tile in _tiles(segments, q.device):
        q_tile, do_tile, o_tile = (t[tile.rows].to(wide) for t in (q_TKGH, do_TKGH, o_TKGH))
        k_tile, v_tile = k[tile.keys].to(wide), v[tile.keys].to(wide)
        scores, capped = _scores(q_tile, k_tile, tile.hidden, segments)
        weights = scores.sub_(lse_KGT[..., tile.rows].unsqueeze(-1)).exp_()
        dv[tile.keys] += torch.einsum("kgts,tkgh->skh", weights, do_tile)
        inner = (do_tile * o_tile).sum(-1).permute(1, 2, 0).unsqueeze(-1)  # [K, G, t, 1]
        d_scores = torch.einsum("tkgh,skh->kgts", do_tile, v_tile).sub_(inner).mul_(weights)
        if capped is not None:
            d_scores *= 1 - capped * capped
        d_scores *= segments.scale
        dq[tile.rows] = torch.einsum("kgts,skh->tkgh", d_scores, k_tile).to(q.dtype)
        dk[tile.keys] += torch.einsum("kgts,tkgh->skh", d_scores, q_tile)
    return dq.flatten(1, 2), dk.to(k.dtype), dv.to(v.dtype)


TILED = Kernel(
    "tiled",
    ("cpu", "cuda"),
    (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    frozenset({PACKED, WINDOW, SOFTCAP, V_SIZE}),
    lambda size, v_size: True,
    _forward,
    _backward,
)
