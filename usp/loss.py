"""Linear layer and cross entropy in one, over tiles of tokens: whole logits never exist."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORE = -100
MAX_TILE_ELEMENTS = 2**28  # logits of one tile; far below 2^31, where 32-bit indexing ends


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, *, tile: int = 1024) -> Tensor:
    """Sum of the token losses of softmax(x @ weight.T) against `labels`.

    x [..., D] and weight [V, D] of one dtype, labels [...] int64 with -100 for tokens that do not count. Scalar in
    float32 (float64 for float64 input). Logits are made in tiles of at most `tile` tokens and made again in the
    backward, where the gradient of `weight` is summed in the result's precision. The number of tiles depends on
    shapes alone. Without a valid label the loss and all gradients are exactly zero. Does not communicate.
    Raises ValueError for shapes that do not fit.
    """
    if labels.shape != x.shape[:-1] or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"labels={tuple(labels.shape)} must have the leading shape of x={tuple(x.shape)} and weight="
            f"{tuple(weight.shape)} its last. Pass x [..., D], weight [V, D], labels [...]."
        )
    if tile < 1:
        raise ValueError(f"tile={tile} must be at least 1. Give the number of tokens per tile.")
    tile = max(1, min(tile, MAX_TILE_ELEMENTS // weight.shape[0]))
    return _LinearCrossEntropy.apply(x.reshape(-1, x.shape[-1]), weight, labels.reshape(-1), tile)


def _tile_logits(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in the wide dtype, which labels count, and labels that can index even where they do not."""
    logits_TV = (x_TD @ weight_VD.T).to(torch.promote_types(x_TD.dtype, torch.float32))
    valid_T = labels_T != IGNORE
    return logits_TV, valid_T, labels_T.where(valid_T, 0)


class _LinearCrossEntropy(torch.autograd.Function):
    """Backward is written in plain operations, so it can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, tile: int) -> Tensor:
        total = x_TD.new_zeros((), dtype=torch.promote_types(x_TD.dtype, torch.float32))
        for x, labels in zip(x_TD.split(tile), labels_T.split(tile), strict=True):
            logits, valid, index = _tile_logits(x, weight_VD, labels)
            picked = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
            losses = torch.logsumexp(logits, -1) - picked
            total = total + losses.where(valid, 0.0).sum()
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.tile = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        x_TD, weight_VD, labels_T = ctx.saved_tensors
        grads_x = []
        grad_weight: Tensor | None = None
        for x, labels in zip(x_TD.split(ctx.tile), labels_T.split(ctx.tile), strict=True):
            logits, valid, index = _tile_logits(x, weight_VD, labels)
            target = torch.zeros_like(logits).scatter(-1, index.unsqueeze(-1), 1.0)
            d_logits = (torch.softmax(logits, -1) - target) * (valid.to(logits.dtype) * grad).unsqueeze(-1)
            d_logits = d_logits.to(x.dtype)
            grads_x.append(d_logits @ weight_VD)
            part = (d_logits.T @ x).to(logits.dtype)
            grad_weight = part if grad_weight is None else grad_weight + part
        assert grad_weight is not None
        return torch.cat(grads_x), grad_weight.to(weight_VD.dtype), None, None
