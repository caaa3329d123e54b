"""Attention on local heads over the whole sequence."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from usp.kernels import KERNELS, Kernel, Mask

_TILE = 512  # queries per tile of the reference, so that no S x S tensor exists


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    kernel: str = "auto",
) -> Tensor:
    """softmax(scale * q k^T) v within documents, on this rank's heads. Does not communicate.

    q [B, S, N, H], k and v [B, S, K, H], N a multiple of K; result like q. `cu_seqlens`, on the CPU, are document
    boundaries over the B rows of S laid end to end, from 0 to B * S; None: one document a row. `scale` is
    1 / sqrt(H) unless given. `kernel`: "cudnn", "flash", "cpu", "reference" (plain torch, any device and dtype,
    any order of derivative), or "auto": the first that takes the input. Kernels but the reference give first
    derivatives only. Raises ValueError for shapes that do not fit or a kernel that cannot take the input.
    """
    _check_shapes(q, k, v)
    rows, length = q.shape[:2]
    edges = tuple(range(0, rows * length + 1, length)) if cu_seqlens is None else tuple(cu_seqlens.tolist())
    rising = all(a < b for a, b in zip(edges, edges[1:], strict=False))
    if edges[:1] != (0,) or edges[-1] != rows * length or not rising:
        raise ValueError(
            f"cu_seqlens must rise from 0 to B * S, got B={rows}, S={length}. Pass boundaries of whole sequences."
        )
    mask = Mask(edges, causal, 1 / math.sqrt(q.shape[3]) if scale is None else scale)
    chosen = _choose(kernel, q, packed=len(edges) != rows + 1)
    if chosen is None:
        return _reference(q, k, v, mask)
    return _Attention.apply(q, k, v, mask, chosen)[0]


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    fits = q.dim() == 4 and k.shape == v.shape and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
    if not fits or k.shape[2] < 1 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k={tuple(k.shape)}, v={tuple(v.shape)} must be [B, S, K, H] with N a multiple of K, got "
            f"q={tuple(q.shape)} as [B, S, N, H]. Move them with seq_to_heads first."
        )


def _choose(name: str, q: Tensor, *, packed: bool) -> Kernel | None:
    """The kernel, or None for the reference."""
    able = [
        k for k in KERNELS.values() if q.device.type in k.devices and q.dtype in k.dtypes and (k.packed or not packed)
    ]
    if name == "reference" or (name == "auto" and not able):
        return None
    if name == "auto":
        return able[0]
    for kernel in able:
        if kernel.name == name:
            return kernel
    what = f"{q.device.type} {q.dtype}" + (" with packed documents" if packed else "")
    choices = ", ".join([*(k.name for k in able), "reference", "auto"])
    raise ValueError(f"kernel={name!r} must take {what}, and does not. Use one of: {choices}.")


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Plain torch, one document and one tile of queries at a time, in at least float32."""
    group = q.shape[2] // k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    flat = [t.flatten(0, 1).to(wide) for t in (q, k, v)]
    outs = []
    for start, stop in zip(mask.edges, mask.edges[1:], strict=False):
        qd, kd, vd = (t[start:stop] for t in flat)
        kd, vd = (t.repeat_interleave(group, 1) for t in (kd, vd))
        for first in range(0, stop - start, _TILE):
            tile = qd[first : first + _TILE]
            last = first + tile.shape[0] if mask.causal else stop - start
            scores = torch.einsum("qnh,snh->nqs", tile, kd[:last]) * mask.scale
            if mask.causal:
                rows = torch.arange(first, first + tile.shape[0], device=q.device).unsqueeze(1)
                hidden = torch.arange(last, device=q.device) > rows
                scores = scores.masked_fill(hidden, -math.inf)
            outs.append(torch.einsum("nqs,snh->qnh", scores.softmax(-1), vd[:last]))
    return torch.cat(outs).view_as(q).to(q.dtype)


class _Attention(torch.autograd.Function):
    """A kernel with its explicit backward; results: output, log-sum-exp and whatever the kernel wants back."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, kernel: Kernel) -> tuple[Tensor, ...]:
        return kernel.forward(q, k, v, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, ctx.mask, ctx.kernel = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(q, k, v, *output)

    @staticmethod
    def backward(ctx: Any, do: Tensor, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        return (*_AttentionBackward.apply(ctx.mask, ctx.kernel, do, *ctx.saved_tensors), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, kernel: Kernel) -> Any:
        """Fold the mapped dimension into the batch."""
        size = info.batch_size
        moved = [
            t.movedim(d, 0) if d is not None else t.expand(size, *t.shape)
            for t, d in zip((q, k, v), in_dims[:3], strict=True)
        ]
        total = mask.edges[-1]
        edges = (0, *(i * total + edge for i in range(size) for edge in mask.edges[1:]))
        folded = (t.flatten(0, 1) for t in moved)
        out = _Attention.apply(*folded, mask._replace(edges=edges), kernel)
        return (out[0].unflatten(0, (size, -1)), *out[1:]), (0, *(None for _ in out[1:]))


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(mask: Mask, kernel: Kernel, do: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return kernel.backward(do, *saved, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        raise RuntimeError('this kernel gives first derivatives only. Use attention(..., kernel="reference").')
