"""Linear layer and cross entropy in one, over tiles of tokens: whole logits never exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

IGNORE = -100
MAX_TILE_ELEMENTS = 2**28  # logits of one tile; far below 2^31, where 32-bit indexing ends


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, *, tile: int = 1024) -> Tensor:
    """Sum of the token losses of softmax(x @ weight.T) against `labels`.

    x [..., D] and weight [V, D] of one dtype, labels [...] int64 with -100 for tokens that do not count.
    Scalar in float32 (float64 for float64 input). Logits are made in tiles of at most `tile` tokens and made
    again in the backward, where the gradient of `weight` is summed in the result's precision. The number of
    tiles depends on shapes alone. Without a valid label the loss and all gradients are exactly zero. Any
    order of derivative, in reverse and forward mode (inside torch.compile reverse only). Does not
    communicate. Raises ValueError for shapes that do not fit.
    """
    if labels.shape != x.shape[:-1] or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"labels={tuple(labels.shape)} must have the leading shape of x={tuple(x.shape)} and weight="
            f"{tuple(weight.shape)} its last. Pass x [..., D], weight [V, D], labels [...]."
        )
    if tile < 1:
        raise ValueError(f"tile={tile} must be at least 1. Give the number of tokens per tile.")
    tile = max(1, min(tile, MAX_TILE_ELEMENTS // weight.shape[0]))
    face = _LinearCrossEntropy if torch.compiler.is_compiling() else _Transformable
    loss = face.apply(x.reshape(-1, x.shape[-1]), weight, labels.reshape(-1), tile)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)


def _tiles(tile: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Up to `tile` tokens at a time of tensors [T, ...]."""
    return zip(*(torch.split(t, tile) for t in tensors), strict=True)


def _tile_logits(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in the wide dtype, which labels count, and labels that can index even where they do not."""
    logits_TV = (x_TD @ weight_VD.T).to(torch.promote_types(x_TD.dtype, torch.float32))
    valid_T = labels_T != IGNORE
    return logits_TV, valid_T, labels_T.where(valid_T, 0)


def _d_logits(logits_TV: Tensor, valid_T: Tensor, index_T: Tensor) -> Tensor:
    """Gradient of the token losses' sum with respect to the logits."""
    target = torch.zeros_like(logits_TV).scatter(-1, index_T.unsqueeze(-1), 1.0)
    return (torch.softmax(logits_TV, -1) - target) * valid_T.to(logits_TV.dtype).unsqueeze(-1)


def _transformed() -> bool:
    """Whether torch.func or torch.compile is at work, under which nothing is written in place."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return torch.compiler.is_compiling() or functorch.peek_interpreter_stack() is not None


def _first_gradients(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, grad: Tensor, tile: int
) -> tuple[Tensor, Tensor, None, None]:
    """What `backward` computes, for no further derivative: written over itself, two tiles of logits at most
    and one gradient of `weight` in the wide dtype."""
    grads_x, sums = [], None
    for x, labels in _tiles(tile, x_TD, labels_T):
        logits, valid, index = _tile_logits(x, weight_VD, labels)
        d_logits = torch.softmax(logits, -1)
        del logits
        d_logits = d_logits.scatter_add_(-1, index.unsqueeze(-1), -torch.ones_like(d_logits[:, :1]))
        d_logits = d_logits.mul_((valid.to(d_logits.dtype) * grad).unsqueeze(-1))
        part = d_logits.to(x.dtype)
        grads_x.append(part @ weight_VD)
        part = part.T @ x
        sums = part.to(d_logits.dtype) if sums is None else sums.add_(part)
    assert sums is not None
    return torch.cat(grads_x), sums.to(weight_VD.dtype), None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """Derivatives are written in plain operations, so they can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, tile: int) -> Tensor:
        total = x_TD.new_zeros((), dtype=torch.promote_types(x_TD.dtype, torch.float32))
        for x, labels in _tiles(tile, x_TD, labels_T):
            logits, valid, index = _tile_logits(x, weight_VD, labels)
            picked = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
            losses = torch.logsumexp(logits, -1) - picked
            total = total + losses.where(valid, 0.0).sum()
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.tile = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        x_TD, weight_VD, labels_T = ctx.saved_tensors
        if not torch.is_grad_enabled() and not _transformed():
            return _first_gradients(x_TD, weight_VD, labels_T, grads[0], ctx.tile)
        grads_x = []
        grad_weight: Tensor | None = None
        for x, labels in _tiles(ctx.tile, x_TD, labels_T):
            d_logits = _d_logits(*_tile_logits(x, weight_VD, labels)) * grads[0]
            part = d_logits.to(x.dtype)
            grads_x.append(part @ weight_VD)
            part = (part.T @ x).to(d_logits.dtype)
            grad_weight = part if grad_weight is None else grad_weight + part
        assert grad_weight is not None
        return torch.cat(grads_x), grad_weight.to(weight_VD.dtype), None, None


class _Transformable(_LinearCrossEntropy):
    """The face with forward mode, which torch.compile refuses."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        dx_TD, d_weight_VD, *_ = tangents
        x_TD, weight_VD, labels_T = ctx.saved_tensors
        total = x_TD.new_zeros((), dtype=torch.promote_types(x_TD.dtype, torch.float32))
        for x, dx, labels in _tiles(ctx.tile, x_TD, dx_TD, labels_T):
            step = _d_logits(*_tile_logits(x, weight_VD, labels))
            total = total + (step * (dx @ weight_VD.T + x @ d_weight_VD.T)).sum()
        return cast(Tensor, total)
