"""Kernel "flash": flash-attn 2 (Dao, arXiv 2307.08691), the copy that torch carries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from usp.kernels.interface import PACKED, WINDOW, Kernel, Segments
from usp.kernels.rows import batched, bounds, lse_batched, lse_flat, num_batch

_aten = torch.ops.aten


def _mask(segments: Segments) -> tuple[bool, dict[str, Any]]:
    """(causal, keywords). Its masks are aligned at the end, like ours; causal is for no other bound."""
    left, right = segments.left, segments.right
    assert all(bound is None or bound >= 0 for bound in (left, right)), "a negative one means none to it"
    if left is None and right in (None, 0):
        return right == 0, {"scale": segments.scale}
    left, right = (-1 if bound is None else bound for bound in (left, right))
    return False, {"scale": segments.scale, "window_size_left": left, "window_size_right": right}


def _forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    causal, options = _mask(segments)
    batch = num_batch(segments)
    if batch is None:
        o, lse, *_ = _aten._flash_attention_forward(
            q, k, v, *bounds(segments, q.device), 0.0, causal, False, **options
        )
        return o, lse  # [T, N, H], [N, T]
    x = [batched(t, batch) for t in (q, k, v)]
    lengths = x[0].shape[1], x[1].shape[1]
    o, lse, *_ = _aten._flash_attention_forward(*x, None, None, *lengths, 0.0, causal, False, **options)
    return o.flatten(0, 1), lse_flat(lse)


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    causal, options = _mask(segments)
    batch = num_batch(segments)
    # seed and offset of a dropout that there is not: made here, so that nothing is kept from the forward
    unread = torch.empty(2, dtype=torch.uint64, device=q.device)
    dropout = (0.0, causal, unread, unread[:1])
    x = [t.contiguous() for t in (do, q, k, v, o)]
    if batch is None:
        dq, dk, dv = _aten._flash_attention_backward(
            *x, lse.contiguous(), *bounds(segments, q.device), *dropout, **options
        )
        return dq, dk, dv
    x = [batched(t, batch) for t in x]
    lengths = x[1].shape[1], x[2].shape[1]
    grads = _aten._flash_attention_backward(
        *x, lse_batched(lse, batch), None, None, *lengths, *dropout, **options
    )
    dq, dk, dv = (t.flatten(0, 1) for t in grads)
    return dq, dk, dv


FLASH = Kernel(
    "flash",
    ("cuda",),
    (torch.bfloat16, torch.float16),
    frozenset({PACKED, WINDOW}),
    lambda size, v_size: size == v_size and size % 8 == 0 and size <= 256,
    _forward,
    _backward,
    lambda device: torch.cuda.get_device_capability(device) >= (8, 0),
)
