"""Kernel "cpu": torch's flash attention for CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from usp.kernels.interface import PACKED, Kernel, Segments
from usp.kernels.rows import batched, lse_batched, lse_flat, num_batch

_aten = torch.ops.aten


def _batches(segments: Segments) -> Iterator[tuple[int, slice, slice]]:
    """(batch, query rows, key rows): all segments at once when they are of one length, else one by one."""
    batch = num_batch(segments)
    if batch is not None:
        yield batch, slice(0, segments.cu_q[-1]), slice(0, segments.cu_k[-1])
        return
    for (q0, q1), (k0, k1) in zip(pairwise(segments.cu_q), pairwise(segments.cu_k), strict=True):
        yield 1, slice(q0, q1), slice(k0, k1)


def _split(t: Tensor, batch: int, rows: slice, copies: int = 1) -> Tensor:
    """Rows of [T, K, H] -> [batch, K * copies, length, H], each head `copies` times in a row."""
    t = batched(t[rows], batch).transpose(1, 2)
    return t if copies == 1 else t.repeat_interleave(copies, 1)


def _join(t: Tensor) -> Tensor:
    """[batch, N, length, H] -> [batch * length, N, H]."""
    return t.transpose(1, 2).flatten(0, 1).contiguous()


def _forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    outs, sums = [], []
    for batch, rows, keys in _batches(segments):
        # its causal mask is aligned at the start: right for equal lengths, and others count as a window
        o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            _split(q, batch, rows),
            _split(k, batch, keys, group),
            _split(v, batch, keys, group),
            0.0,
            segments.right == 0,
            scale=segments.scale,
        )
        outs.append(_join(o))
        sums.append(lse_flat(lse))  # handed out as [batch, N, length], whatever its strides
    if len(outs) == 1:
        return outs[0], sums[0]
    return torch.cat(outs), torch.cat(sums, 1)


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    num_kv = k.shape[1]
    group = q.shape[1] // num_kv
    grads: tuple[list[Tensor], ...] = ([], [], [])
    for batch, rows, keys in _batches(segments):
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _split(do, batch, rows),
            _split(q, batch, rows),
            _split(k, batch, keys, group),
            _split(v, batch, keys, group),
            _split(o, batch, rows),
            lse_batched(lse[:, rows], batch),
            0.0,
            segments.right == 0,
            scale=segments.scale,
        )
        if group > 1:
            dk, dv = (torch.unflatten(t, 1, (num_kv, group)).sum(2) for t in (dk, dv))
        for kept, grad in zip(grads, (dq, dk, dv), strict=True):
            kept.append(_join(grad))
    dq, dk, dv = (kept[0] if len(kept) == 1 else torch.cat(kept) for kept in grads)
    return dq, dk, dv


CPU = Kernel(
    "cpu",
    ("cpu",),
    (torch.float64, torch.float32, torch.bfloat16),
    frozenset({PACKED}),
    lambda size, v_size: size == v_size,
    _forward,
    _backward,
)
