"""AdamW's update of large leaves as one compiled pass over memory, which is all the time that it takes.

Parameter, gradient and moments are read once; parameter and moments are written once, where they lie.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

LARGE = 1 << 21
"""Elements from which a leaf's pass is worth a launch of its own, and the host's time for it."""
WIDTH = 16
"""Of the rows that a leaf is seen as: known when it is compiled, so that every load is as wide as can be."""
ROWS = 1 << 26
"""In one pass at most: an index then fits 32 bits."""
MOST = (2**31 - 1) // WIDTH  # rows that the compiled pass is told to expect


class Leaf(NamedTuple):
    p: Tensor
    grad: Tensor
    m: Tensor
    v: Tensor
    steps: Tensor
    """Updates made, a scalar on p's device."""


def suits(leaf: Leaf) -> bool:
    """Whether the compiled pass is for this leaf."""
    large = leaf.p.numel() >= LARGE and leaf.p.numel() % WIDTH == 0
    return large and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in leaf[:4])


def update_large(
    leaves: Sequence[Leaf],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: Tensor | None,
) -> None:
    """One step, in place, of contiguous leaves with a multiple of `WIDTH` elements. Gradients are only read.

    Computed in float32 or wider. Nothing is compiled again for another number of elements, learning rate or
    step, and the host does not wait.
    """
    steps = [leaf.steps for leaf in leaves]
    torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
    scale = 1.0 if grad_scale is None else grad_scale
    exact = _factors(steps, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, scale=scale)
    wide = [torch.promote_types(leaf.p.dtype, torch.float32) for leaf in leaves]
    tables = {dtype: exact.to(dtype) for dtype in dict.fromkeys(wide)}
    run = _compiled()
    for place, (leaf, dtype) in enumerate(zip(leaves, wide, strict=True)):
        factors = tables[dtype][place]
        for piece in zip(*(_pieces(t) for t in leaf[:4]), strict=True):
            run(*piece, factors)


def _factors(
    steps: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: float | Tensor,
) -> Tensor:
    """[leaves, 12]: what `one_pass` is told of each leaf, worked out on the device; float64, as in torch."""
    count = torch.stack(list(steps)).double()
    kept_m, kept_v = 1 - betas[0] ** count, 1 - betas[1] ** count
    shares = (1 - betas[0], betas[0], 1 - betas[1], betas[1])
    columns = (scale, lr * weight_decay, *shares, lr / kept_m, kept_v.rsqrt(), eps)
    table = count.new_zeros(len(steps), 12)  # every row starts at a multiple of 16 bytes
    for place, column in enumerate(columns):
        table[:, place] = column
    return table


def _pieces(t: Tensor) -> Sequence[Tensor]:
    """[rows, WIDTH] each, in memory's order."""
    rows = t.detach().view(-1, WIDTH)
    pieces = rows.tensor_split(-(-rows.shape[0] // ROWS))
    for piece in pieces:
        torch._dynamo.mark_dynamic(piece, 0, min=2, max=MOST)  # from the start: no first one for one size
    return pieces


def one_pass(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, factors: Tensor) -> None:
    """One step with these `_factors`, computed in their dtype."""
    scale, decay, share_m, keep_m, share_v, keep_v, size, root, eps, *_ = factors.unbind()
    wide = factors.dtype
    g, old_m, old_v, old_p = grad.to(wide) * scale, m.to(wide), v.to(wide), p.to(wide)
    new_m, new_v = _mean(old_m, g, share_m, keep_m), _mean(old_v, g * g, share_v, keep_v)
    new_p = old_p - old_p * decay
    p.copy_(new_p - size * new_m / (new_v.sqrt() * root + eps))
    m.copy_(new_m)
    v.copy_(new_v)


def _mean(old: Tensor, new: Tensor, share: Tensor, keep: Tensor) -> Tensor:
    """keep * old + share * new, from the end that counts for more: the factor near 1 would lose digits."""
    return torch.where(share < 0.5, old + (new - old) * share, new + (old - new) * keep)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    logging.getLogger("usp").info("compiling the update of AdamW; the first step takes some seconds longer")
    options: Any = {"triton.autotune_pointwise": False}  # trying several would copy a whole leaf's tensors
    return torch.compile(one_pass, fullgraph=True, dynamic=False, options=options)
