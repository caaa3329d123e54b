"""How a linear move between ranks is differentiated: its derivative is itself, its transpose runs it back."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor

from usp.mesh.constants import constant


class LinearOp(Protocol):
    """A linear map of one tensor, without the tensor."""

    def empty(self) -> bool:
        """Whether it leaves every tensor as it is."""
        ...

    def run(self, x: Tensor) -> Tensor:
        """Carry it out on a plain tensor; the result shares no memory with x."""
        ...

    def transposed(self) -> LinearOp: ...

    def batched(self, size: int) -> LinearOp:
        """The same map on tensors with one more leading dimension of `size`."""
        ...


def apply_linear(x: Tensor, op: LinearOp) -> Tensor:
    """`op` on x, under autograd, torch.func transforms and torch.compile alike."""
    if op.empty():
        return x
    if not torch.compiler.is_compiling():
        return cast(Tensor, _Linear.apply(x, op))  # type: ignore[no-untyped-call]
    if others := _other_transforms():
        raise NotImplementedError(
            f"inside torch.compile a move must be under reverse mode alone, got {', '.join(others)}, of "
            f"which torch makes wrong values without a word. Leave the transform uncompiled."
        )
    # torch.compile over torch.func.grad loses the gradient of a Function's own input; a view between keeps it
    return cast(Tensor, _CompiledLinear.apply(x.view_as(x), op))  # type: ignore[no-untyped-call]


@constant
def _other_transforms() -> tuple[str, ...]:
    """Transforms of torch.func under way, but for gradients; seen while torch.compile traces."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    kinds = functorch.TransformType
    names = {kinds.Vmap: "vmap", kinds.Jvp: "jvp"}
    stack = functorch.get_interpreter_stack() or []
    return tuple(names[level.key()] for level in stack if level.key() in names)


class _CompiledLinear(torch.autograd.Function):
    """The face that torch.compile takes: no jvp (dynamo refuses a Function that has one)."""

    @staticmethod
    def forward(x: Tensor, op: LinearOp) -> Tensor:
        return op.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.op = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return apply_linear(grads[0], ctx.op.transposed()), None


class _Linear(_CompiledLinear):
    """The fully transformable face."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return apply_linear(tangents[0], ctx.op)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        x, op = args
        return apply_linear(x.movedim(in_dims[0], 0), op.batched(info.batch_size)), 0
