"""Kernel "flash": flash-attn 2 (Dao, arXiv 2307.08691), the copy that torch carries."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from usp.kernels.interface import PACKED, WINDOW, Kernel, Segments

_aten = torch.ops.aten


@lru_cache(maxsize=16)
def on_device(cu: tuple[int, ...], device: torch.device) -> Tensor:
    """Boundaries as int32 on a device: pinned, so that nothing waits, and made once for all layers.

    Cached for use on the stream that computes: a stream beside it would have to wait for the copy.
    """
    return torch.tensor(cu, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)


def _bounds(segments: Segments, device: torch.device) -> tuple[Tensor | None, Tensor | None, int, int]:
    """(cu_q, cu_k, longest queries, longest keys); no boundaries for one segment."""
    cu_q, cu_k = segments.cu_q, segments.cu_k
    if len(cu_q) == 2:
        return None, None, cu_q[1], cu_k[1]
    longest_q, longest_k = (max(b - a for a, b in pairwise(cu)) for cu in (cu_q, cu_k))
    return on_device(cu_q, device), on_device(cu_k, device), longest_q, longest_k


def _options(segments: Segments) -> tuple[bool, dict[str, Any]]:
    """(causal, keywords). Its masks are aligned at the end, like ours; causal is for no other bound."""
    causal = segments.left is None and segments.right == 0
    if causal or (segments.left is None and segments.right is None):
        return causal, {"scale": segments.scale}
    left, right = (-1 if bound is None else bound for bound in (segments.left, segments.right))
    return False, {"scale": segments.scale, "window_size_left": left, "window_size_right": right}


def _rows(one: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """[T, N, H], or [1, T, N, H] for a call without boundaries."""
    return tuple(t.unsqueeze(0) for t in tensors) if one else tensors


def _forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    cu_q, cu_k, longest_q, longest_k = _bounds(segments, q.device)
    causal, options = _options(segments)
    x = _rows(cu_q is None, q, k, v)
    o, lse, *_ = _aten._flash_attention_forward(
        *x, cu_q, cu_k, longest_q, longest_k, 0.0, causal, False, **options
    )
    return o.view(q.shape), lse.view(q.shape[1], q.shape[0])


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    cu_q, cu_k, longest_q, longest_k = _bounds(segments, q.device)
    causal, options = _options(segments)
    x = _rows(cu_q is None, do.contiguous(), q, k, v, o)
    lse = lse if cu_q is not None else lse.unsqueeze(0)
    # dropout's seed and offset, of which there is none; made in one piece, so that nothing is kept between
    rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)
    unread = torch.empty((), dtype=torch.uint64, device=q.device)
    dq, dk, dv = _aten._flash_attention_backward(
        *x, lse, cu_q, cu_k, longest_q, longest_k, 0.0, causal, rng_state, unread, **options
    )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


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
