"""Linear layer and cross entropy in one, over tiles of tokens: whole logits never exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from usp.batch import IGNORE
from usp.levels import has_tangent, is_batched, levels, one_gradient
from usp.loss_tile import tile_pass
from usp.products import add_product

MAX_TILE_ELEMENTS = 2**29  # logits of one tile; below 2^31, where 32-bit indexing ends


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, *, tile: int = 4096, compiled: bool = False
) -> Tensor:
    """Sum of the token losses of softmax(x @ weight.T) against `labels`.

    x [..., D] and weight [V, D] of one dtype, labels [...] int64 with -100 for tokens that do not count.
    Scalar in float32 (float64 for float64 input). Logits are made in tiles of at most `tile` tokens, once:
    where a gradient is asked for it is computed with the loss, that of `weight` summed in the result's
    precision (the idea of Liger's fused loss, arXiv 2410.10989), and scaled in the backward. The number of
    tiles depends on shapes alone. Without a valid label the loss and all gradients are exactly zero. Any
    order of derivative, in reverse and forward mode (inside torch.compile reverse only), at the price of a
    second look at the tiles. With a gradient, a tile's logits are read and written by one kernel on CUDA;
    where that cannot be, `compiled` makes one pass of what is done to them. Does not communicate. Raises
    ValueError for shapes that do not fit.
    """
    if labels.shape != x.shape[:-1] or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"labels={tuple(labels.shape)} must have the leading shape of x={tuple(x.shape)} and weight="
            f"{tuple(weight.shape)} its last. Pass x [..., D], weight [V, D], labels [...]."
        )
    if tile < 1:
        raise ValueError(f"tile={tile} must be at least 1. Give the number of tokens per tile.")
    tile = max(1, min(tile, MAX_TILE_ELEMENTS // weight.shape[0]))
    x, labels = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    if torch.compiler.is_compiling():
        return cast(Tensor, _LinearCrossEntropy.apply(x, weight, labels, tile))  # type: ignore[no-untyped-call]
    if (
        torch.is_grad_enabled()
        and (x.requires_grad or weight.requires_grad)
        and (one_gradient() or not levels())
        and not has_tangent(x, weight)
    ):
        return cast(Tensor, _Fused.apply(x, weight, labels, tile, compiled)[0])  # type: ignore[no-untyped-call]
    return cast(Tensor, _Transformable.apply(x, weight, labels, tile))  # type: ignore[no-untyped-call]


def tiles(tile: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Up to `tile` tokens at a time of tensors [T, ...]."""
    return zip(*(torch.split(t, tile) for t in tensors), strict=True)


def tile_logits(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in the wide dtype, which labels count, and labels that can index even where they do not."""
    logits_TV = (x_TD @ weight_VD.T).to(torch.promote_types(x_TD.dtype, torch.float32))
    valid_T = labels_T != IGNORE
    return logits_TV, valid_T, labels_T.where(valid_T, 0)


def d_logits_of(logits_TV: Tensor, valid_T: Tensor, index_T: Tensor) -> Tensor:
    """Gradient of the token losses' sum with respect to the logits."""
    target = torch.zeros_like(logits_TV).scatter(-1, index_T.unsqueeze(-1), 1.0)
    return (torch.softmax(logits_TV, -1) - target) * valid_T.to(logits_TV.dtype).unsqueeze(-1)


def gradients(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, grad: Tensor, tile: int
) -> tuple[Tensor, Tensor]:
    """Of the token losses with respect to x and weight, in plain operations, to be differentiated again.

    `grad`: one for all tokens, or one for each.
    """
    grads_x = []
    grad_weight: Tensor | None = None
    for x, labels, upstream in tiles(tile, x_TD, labels_T, grad.expand(labels_T.shape)):
        d_logits = d_logits_of(*tile_logits(x, weight_VD, labels)) * upstream.unsqueeze(-1)
        part = d_logits.to(x.dtype)
        grads_x.append(part @ weight_VD)
        part = (part.T @ x).to(d_logits.dtype)
        grad_weight = part if grad_weight is None else grad_weight + part
    assert grad_weight is not None
    return torch.cat(grads_x), grad_weight.to(weight_VD.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    """Derivatives are written in plain operations, so they can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, tile: int) -> Tensor:
        total = x_TD.new_zeros((), dtype=torch.promote_types(x_TD.dtype, torch.float32))
        for x, labels in tiles(tile, x_TD, labels_T):
            logits, valid, index = tile_logits(x, weight_VD, labels)
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
        return *gradients(x_TD, weight_VD, labels_T, grads[0], ctx.tile), None, None


class _Transformable(_LinearCrossEntropy):
    """The face with forward mode, which torch.compile refuses."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        dx_TD, d_weight_VD, *_ = tangents
        x_TD, weight_VD, labels_T = ctx.saved_tensors
        total = x_TD.new_zeros((), dtype=torch.promote_types(x_TD.dtype, torch.float32))
        for x, dx, labels in tiles(ctx.tile, x_TD, dx_TD, labels_T):
            step = d_logits_of(*tile_logits(x, weight_VD, labels))
            total = total + (step * (dx @ weight_VD.T + x @ d_weight_VD.T)).sum()
        return cast(Tensor, total)


class _Fused(torch.autograd.Function):
    """The loss with its gradients: logits are made once. Results: loss, gradient of x, gradient of weight."""

    @staticmethod
    def forward(
        x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, tile: int, compiled: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        total, grad_x = x_TD.new_zeros((), dtype=wide), torch.empty_like(x_TD)
        grad_weight: Tensor | None = None
        for x, labels, grad in tiles(tile, x_TD, labels_T, grad_x):
            loss, d_logits = tile_pass(x @ weight_VD.T, labels, compiled=compiled)
            total += loss
            torch.mm(d_logits, weight_VD, out=grad)
            grad_weight = add_product(grad_weight, d_logits.T, x)
            del d_logits  # before the next tile's are made
        assert grad_weight is not None
        return total, grad_x, grad_weight.to(weight_VD.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.tile, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if grads[0] is None:
            return None, None, None, None, None
        x_TD, weight_VD, labels_T, grad_x, grad_weight = ctx.saved_tensors
        if torch.is_grad_enabled() or levels():  # to be differentiated again
            return *gradients(x_TD, weight_VD, labels_T, grads[0], ctx.tile), None, None, None
        scale = grads[0]
        return (
            scaled(grad_x, scale) if ctx.needs_input_grad[0] else None,
            scaled(grad_weight, scale) if ctx.needs_input_grad[1] else None,
            None, None, None,
        )  # fmt: skip


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """x * scale, a scalar on its device, in the dtype of x; the kernel for lists reads whole lines."""
    if is_batched(scale):
        return x * scale.to(x.dtype)
    (found,) = torch._foreach_mul([x], scale.to(x.dtype))  # pyright: ignore[reportPrivateImportUsage]
    return found
