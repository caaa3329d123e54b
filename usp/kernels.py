"""Attention kernels behind one interface: output and log-sum-exp forward, an explicit backward.

Shapes: q, o [B, S, N, H], k, v [B, S, K, H] with N a multiple of K, log-sum-exp float32 (float64 for float64
input) in the kernel's own layout. `edges` are document boundaries over the B * S rows laid end to end (host
integers), so no kernel waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten

Edges = tuple[int, ...]


class Mask(NamedTuple):
    """What may attend to what, and the scale of the scores."""

    edges: Edges
    causal: bool
    scale: float


class Kernel(NamedTuple):
    """forward(q, k, v, mask) -> o, lse, *state; backward(do, q, k, v, o, lse, *state, mask) -> dq, dk, dv.

    lse: log-sum-exp; state: up to two tensors. `packed`: whether it takes documents inside rows.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    packed: bool
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _documents(mask: Mask, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Each document's rows of [B, S, N, H] tensors as [1, N, length, H]."""
    flat = [t.flatten(0, 1) for t in tensors]
    for start, stop in pairwise(mask.edges):
        yield tuple(t[start:stop].transpose(0, 1).unsqueeze(0) for t in flat)


def _join(documents: list[Tensor], like: Tensor) -> Tensor:
    """[1, N, length, H] per document -> [B, S, N, H]."""
    return torch.cat([d.squeeze(0).transpose(0, 1) for d in documents]).view(
        *like.shape[:2], -1, like.shape[3]
    )


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, ...]:
    group = q.shape[2] // k.shape[2]
    outs, sums = [], []
    for qd, kd, vd in _documents(mask, q, k, v):
        kd, vd = (t.repeat_interleave(group, 1) for t in (kd, vd))
        o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            qd, kd, vd, 0.0, mask.causal, scale=mask.scale
        )
        outs.append(o)
        sums.append(lse.flatten())
    return _join(outs, q), torch.cat(sums)


def _cpu_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, num_kv = q.shape[2], k.shape[2]
    grads: tuple[list[Tensor], ...] = ([], [], [])
    at = 0
    for dod, qd, kd, vd, od in _documents(mask, do, q, k, v, o):
        length = qd.shape[2]
        lse_d = lse[at : at + num_heads * length]
        # the kernel hands log-sum-exp out as [1, N, S], stored as [1, S, N]
        lse_d = lse_d.view(1, num_heads, length)
        at += num_heads * length
        kd, vd = (t.repeat_interleave(num_heads // num_kv, 1) for t in (kd, vd))
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dod, qd, kd, vd, od, lse_d, 0.0, mask.causal, scale=mask.scale
        )
        dk, dv = (t.unflatten(1, (num_kv, -1)).sum(2) for t in (dk, dv))
        for kept, grad in zip(grads, (dq, dk, dv), strict=True):
            kept.append(grad)
    return _join(grads[0], q), _join(grads[1], k), _join(grads[2], v)


def _flash_args(q: Tensor, mask: Mask) -> tuple[Tensor | None, int]:
    """(cu_seqlens on the device or None when every row is one document, longest document)."""
    rows, length = q.shape[:2]
    if mask.edges == tuple(range(0, rows * length + 1, length)):
        return None, length
    longest = max(b - a for a, b in pairwise(mask.edges))
    host = torch.tensor(mask.edges, dtype=torch.int32, pin_memory=True)
    return host.to(q.device, non_blocking=True), longest


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, ...]:
    cu, longest = _flash_args(q, mask)
    x = (q, k, v) if cu is None else tuple(t.flatten(0, 1) for t in (q, k, v))
    o, lse, state, unused, _ = _aten._flash_attention_forward(
        *x, cu, cu, longest, longest, 0.0, mask.causal, False, scale=mask.scale
    )
    return o.view_as(q), lse, state, unused


def _flash_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    state: Tensor,
    unused: Tensor,
    mask: Mask,
) -> tuple[Tensor, Tensor, Tensor]:
    cu, longest = _flash_args(q, mask)
    x = (do, q, k, v, o) if cu is None else tuple(t.flatten(0, 1) for t in (do, q, k, v, o))
    dq, dk, dv = _aten._flash_attention_backward(
        *x, lse, cu, cu, longest, longest, 0.0, mask.causal, state, unused, scale=mask.scale
    )
    return dq.view_as(q), dk.view_as(k), dv.view_as(v)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, ...]:
    x = (t.transpose(1, 2) for t in (q, k, v))
    out = _aten._scaled_dot_product_cudnn_attention(*x, None, True, 0.0, mask.causal, False, scale=mask.scale)
    return out[0].transpose(1, 2), out[1], out[6], out[7]


def _cudnn_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    mask: Mask,
) -> tuple[Tensor, Tensor, Tensor]:
    do, qt, kt, vt, ot = (t.transpose(1, 2) for t in (do, q, k, v, o))
    length = q.shape[1]
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        do,
        qt,
        kt,
        vt,
        ot,
        lse,
        seed,
        offset,
        None,
        None,
        None,
        length,
        length,
        0.0,
        mask.causal,
        scale=mask.scale,
    )
    dq, dk, dv = (t.transpose(1, 2) for t in grads)
    return dq, dk, dv


_HALF = (torch.bfloat16, torch.float16)
_WIDE = (torch.float32, torch.float64)

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("cudnn", ("cuda",), _HALF, False, _cudnn_forward, _cudnn_backward),
        Kernel("flash", ("cuda",), _HALF, True, _flash_forward, _flash_backward),
        Kernel("cpu", ("cpu",), (*_WIDE, torch.bfloat16), True, _cpu_forward, _cpu_backward),
    )
}
"""In order of preference. Kernel "reference" is not here: it is plain torch (`usp.attention`)."""
