"""The product after attention, in two nodes of autograd, so that its input is let go between them.

The gradient of a product's input is as large as that input. Here it is never made: the gradient of the
product goes on as it is to attention's chunks, each of which takes its own columns of the weight. So what
attention gives autograd is the product, only promised, a zero without memory; `product` gives it its value.
The weight's gradient is taken first, after which attention's output is not needed any more.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def product(promised: Tensor, out: Tensor, weight: Tensor, plus: Tensor | None) -> Tensor:
    """out [B, S, N, H] @ weight.T, weight [E, N * H], and `plus` added where there is one: [B, S, E].

    The gradient of the product goes to `promised`, none to `out`.
    """
    return cast(Tensor, _Product.apply(promised, out, weight, plus))  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(promised: Tensor, out: Tensor, weight: Tensor, plus: Tensor | None) -> Tensor:
        rows = out.flatten(2).flatten(0, 1)
        z = torch.mm(rows, weight.T) if plus is None else torch.addmm(plus.flatten(0, 1), rows, weight.T)
        return z.view(promised.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.has_plus = inputs[3] is not None
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad, (out,) = grads[0], ctx.saved_tensors
        d_weight = _WeightGradient.apply(grad, out) if ctx.needs_input_grad[2] else None  # type: ignore[no-untyped-call]
        return grad, None, d_weight, grad if ctx.has_plus else None


class _WeightGradient(torch.autograd.Function):
    """A node of its own: autograd takes `out` for a constant, a second derivative would be wrong."""

    @staticmethod
    def forward(grad: Tensor, out: Tensor) -> Tensor:
        return grad.flatten(0, 1).T @ out.flatten(2).flatten(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise RuntimeError("chunks of heads give first derivatives only. Use head_chunks=1 for higher ones.")
