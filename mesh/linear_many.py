"""`apply_many`: as `apply_linear`, for a linear map of several tensors at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class ManyOp(Protocol):
    """A linear map of several tensors, without the tensors."""

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Carry it out on plain tensors; the results share no memory with them."""
        ...

    def zeros(self, like: Tensor, index: int) -> Tensor:
        """A zero in the place of argument `index`, where no tangent comes in."""
        ...

    def transposed(self) -> ManyOp: ...

    def batched(self, size: int) -> ManyOp:
        """The same map on tensors with one more leading dimension of `size`."""
        ...


def apply_many(op: ManyOp, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`op` on tensors, under autograd, torch.func transforms and torch.compile alike."""
    if not torch.compiler.is_compiling():
        return cast("tuple[Tensor, ...]", _Many.apply(op, *tensors))  # type: ignore[no-untyped-call]
    # torch.compile over torch.func.grad loses the gradient of a Function's own input; a view between keeps it
    views = [t.view_as(t) for t in tensors]
    return cast("tuple[Tensor, ...]", _CompiledMany.apply(op, *views))  # type: ignore[no-untyped-call]


class _CompiledMany(torch.autograd.Function):
    """The face that torch.compile takes: no jvp (dynamo refuses a Function that has one)."""

    @staticmethod
    def forward(op: ManyOp, *tensors: Tensor) -> tuple[Tensor, ...]:
        return op.run(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return None, *apply_many(ctx.op.transposed(), grads)


class _Many(_CompiledMany):
    """The fully transformable face."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        own = tangents[1:]
        one = next(t for t in own if t is not None)
        return apply_many(ctx.op, [ctx.op.zeros(one, i) if t is None else t for i, t in enumerate(own)])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        op, *tensors = args
        size = info.batch_size
        stacked = [
            t.expand(size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(tensors, in_dims[1:], strict=True)
        ]
        return apply_many(op.batched(size), stacked), (0,) * len(tensors)
