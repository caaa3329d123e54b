"""Kernel "cudnn": cuDNN's fused attention through torch. Dense rows only."""

from __future__ import annotations

import torch
from torch import Tensor

from usp.kernels.interface import Kernel, Segments

_aten = torch.ops.aten


def _batched(t: Tensor, cu: tuple[int, ...]) -> Tensor:
    """Rows [T, N, H] -> [B, N, S, H], a view; the segments are of one length."""
    return torch.unflatten(t, 0, (len(cu) - 1, -1)).transpose(1, 2)


def _flat(t: Tensor) -> Tensor:
    """[B, N, S, H] -> [B * S, N, H]; a view where cuDNN kept the layout of its input, as it does."""
    return t.transpose(1, 2).flatten(0, 1)


def _forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    out = _aten._scaled_dot_product_cudnn_attention(
        _batched(q, segments.cu_q),
        _batched(k, segments.cu_k),
        _batched(v, segments.cu_k),
        None,
        True,
        0.0,
        segments.right == 0,
        False,
        scale=segments.scale,
    )
    lse = out[1].squeeze(-1).transpose(0, 1).flatten(1)  # [B, N, S, 1] -> [N, B * S]
    return _flat(out[0]), lse.contiguous()


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    cu_q, cu_k = segments.cu_q, segments.cu_k
    batch = len(cu_q) - 1
    unread = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset: there is none
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        _batched(do.contiguous(), cu_q),
        _batched(q, cu_q),
        _batched(k, cu_k),
        _batched(v, cu_k),
        _batched(o, cu_q),
        torch.unflatten(lse, 1, (batch, -1)).transpose(0, 1).unsqueeze(-1).contiguous(),
        unread,
        unread,
        None,
        None,
        None,
        cu_q[-1] // batch,
        cu_k[-1] // batch,
        0.0,
        segments.right == 0,
        scale=segments.scale,
    )
    dq, dk, dv = (_flat(t) for t in grads)
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
