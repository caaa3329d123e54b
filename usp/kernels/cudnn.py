"""Kernel "cudnn": cuDNN's fused attention through torch, for segments of one length."""

from __future__ import annotations

import torch
from torch import Tensor

from usp.kernels.interface import Kernel, Segments
from usp.kernels.rows import batched, lse_batched, lse_flat
from usp.kernels.tiled import TILED

_aten = torch.ops.aten


def _heads_first(t: Tensor, batch: int) -> Tensor:
    """[batch * S, N, H] -> [batch, N, S, H], strided as cuDNN wants it: rows end to end."""
    return batched(t.contiguous(), batch).transpose(1, 2)


def _rows(t: Tensor) -> Tensor:
    """[batch, N, S, H] -> [batch * S, N, H]; cuDNN keeps the strides of its input, so this is a view."""
    return t.transpose(1, 2).flatten(0, 1)


def _single_key(segments: Segments) -> bool:
    """cuDNN does not take one key."""
    return segments.cu_k[-1] == len(segments.cu_k) - 1


def _forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    if _single_key(segments):
        return TILED.forward(q, k, v, segments)
    batch = len(segments.cu_q) - 1
    x = [_heads_first(t, batch) for t in (q, k, v)]
    # with equal lengths only is its causal mask, aligned at the start, ours: others count as a window
    o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        *x, None, True, 0.0, segments.right == 0, False, scale=segments.scale
    )
    return _rows(o), lse_flat(lse.flatten(2))  # [batch, N, S, 1]


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    if _single_key(segments):
        return TILED.backward(do, q, k, v, o, lse, segments)
    batch = len(segments.cu_q) - 1
    x = [_heads_first(t, batch) for t in (do, q, k, v, o)]
    lengths = x[1].shape[2], x[2].shape[2]
    # seed and offset of a dropout that there is not: made here, so that nothing is kept from the forward
    unread = torch.empty((), dtype=torch.int64, device=q.device)
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        *x,
        lse_batched(lse, batch).unsqueeze(-1),
        unread,
        unread,
        None,
        None,
        None,
        *lengths,
        0.0,
        segments.right == 0,
        scale=segments.scale,
    )
    dq, dk, dv = (_rows(t) for t in grads)
    return dq, dk, dv


CUDNN = Kernel(
    "cudnn",
    ("cuda",),
    (torch.bfloat16, torch.float16),
    frozenset(),
    lambda size, v_size: size == v_size and size % 8 == 0 and size <= 128,
    _forward,
    _backward,
    lambda device: torch.cuda.get_device_capability(device) >= (8, 0),
)
