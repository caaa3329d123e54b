"""Attention on local heads over the whole sequence."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, cast

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

    q [B, S, N, H], k and v [B, S, K, H], N a multiple of K; result like q. `cu_seqlens`, on the CPU, are
    document boundaries over the B rows of S laid end to end, every end of a row among them; None: one
    document a row. `scale` is 1 / sqrt(H) unless given. `kernel`: "cudnn", "flash", "cpu", "reference" (plain
    torch, any device and dtype, any order of derivative, forward mode too), or "auto": the first that takes
    the input. Kernels but the reference give first derivatives in reverse mode only. Raises ValueError for
    shapes or boundaries that do not fit or a kernel that cannot take the input.
    """
    _check_shapes(q, k, v)
    rows, length = q.shape[:2]
    edges = tuple(range(0, rows * length + 1, length))
    if cu_seqlens is not None:
        edges = _boundaries(cu_seqlens, edges)
    mask = Mask(edges, causal, 1 / math.sqrt(q.shape[3]) if scale is None else scale)
    chosen = _choose(kernel, q, packed=len(edges) != rows + 1)
    if chosen is None:
        return _reference(q, k, v, mask)
    return cast(Tensor, _Attention.apply(q, k, v, mask, chosen)[0])  # type: ignore[no-untyped-call]


def _boundaries(cu_seqlens: Tensor, row_edges: tuple[int, ...]) -> tuple[int, ...]:
    """Document boundaries as host integers; they must rise and hold every end of a row."""
    if cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens must be on the CPU, got {cu_seqlens.device}: reading it would wait for the device. "
            f"Keep it where shard_batch made it."
        )
    edges = tuple(cu_seqlens.tolist())
    rising = all(a < b for a, b in pairwise(edges))
    if not rising or edges[:1] != (0,) or edges[-1] != row_edges[-1] or not set(row_edges) <= set(edges):
        raise ValueError(
            f"cu_seqlens must rise from 0 to B * S through the end of every row, got B={len(row_edges) - 1}, "
            f"S={row_edges[1]}. Pass boundaries of whole sequences, and end documents where rows end."
        )
    return edges


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
        k
        for k in KERNELS.values()
        if q.device.type in k.devices and q.dtype in k.dtypes and (k.packed or not packed)
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
    for start, stop in pairwise(mask.edges):
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
    """A kernel with its explicit backward. Results: output, log-sum-exp and what else the kernel keeps."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, kernel: Kernel) -> tuple[Tensor, ...]:
        return kernel.forward(q, k, v, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, ctx.mask, ctx.kernel = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # no zeros for gradients of what only the backward reads
        ctx.save_for_backward(q, k, v, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        q, k, v, o, *kept = ctx.saved_tensors
        kept = (*kept, *(None for _ in range(3 - len(kept))))
        d_qkv = _AttentionBackward.apply(grads[0], q, k, v, o, *kept, ctx.mask, ctx.kernel)  # type: ignore[no-untyped-call]
        return (*d_qkv, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """Fold the mapped dimension into the batch. What the kernel keeps stays folded, for its backward."""
        size, (mask, kernel) = info.batch_size, args[3:]
        q, k, v = (_leading(t, d, size).flatten(0, 1) for t, d in zip(args[:3], in_dims[:3], strict=True))
        out = _Attention.apply(q, k, v, _repeated(mask, size), kernel)  # type: ignore[no-untyped-call]
        return (out[0].unflatten(0, (size, -1)), *out[1:]), (0, *(None for _ in out[1:]))


class _AttentionBackward(torch.autograd.Function):
    """No *args in `forward`: torch.compile counts its parameters."""

    @staticmethod
    def forward(
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        state: Tensor | None,
        more: Tensor | None,
        mask: Mask,
        kernel: Kernel,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kept = [t for t in (lse, state, more) if t is not None]
        return kernel.backward(do, q, k, v, o, *kept, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise RuntimeError(
            'this kernel gives first derivatives only. Use attention(..., kernel="reference").'
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        size, kept, (mask, kernel) = info.batch_size, args[5:8], args[8:]
        whole = [_leading(t, d, size) for t, d in zip(args[:5], in_dims[:5], strict=True)]
        if in_dims[4] is not None:  # o was mapped: the forward was folded, and with it what the kernel kept
            folded = [t.flatten(0, 1) for t in whole]
            grads = _AttentionBackward.apply(*folded, *kept, _repeated(mask, size), kernel)  # type: ignore[no-untyped-call]
            return tuple(g.unflatten(0, (size, -1)) for g in grads), (0, 0, 0)
        each = [
            _AttentionBackward.apply(*(t[i] for t in whole), *kept, mask, kernel)  # type: ignore[no-untyped-call]
            for i in range(size)
        ]
        return tuple(torch.stack(g) for g in zip(*each, strict=True)), (0, 0, 0)


def _leading(t: Tensor, dim: int | None, size: int) -> Tensor:
    """The mapped dimension of `t` in front; an unmapped tensor is repeated."""
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _repeated(mask: Mask, size: int) -> Mask:
    """The mask of `size` copies of the batch laid end to end."""
    total = mask.edges[-1]
    return mask._replace(edges=(0, *(i * total + edge for i in range(size) for edge in mask.edges[1:])))
