"""Gradients handed from layer to layer so that nobody keeps one when it has been used.

Autograd holds the gradients it is given until it is done, and an autograd.Function's caller holds the
arguments. So a gradient travels beside them, in a `Handover`, and a stand-in of no memory in its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from usp.levels import levels


@dataclass
class Handover:
    """The gradient of a block's result, until somebody takes it."""

    grad: Tensor | None = None
    own: bool = False
    """Whether the scan made it: then nobody else has it, and it may be written over."""

    def take(self) -> Tensor:
        grad, self.grad = self.grad, None
        assert grad is not None, "a gradient is handed over once"
        return grad

    def follow(self) -> Origin:
        return Origin(self)


class Origin:
    """Remembers a gradient, without holding it, to tell whether what was made of it is something new."""

    def __init__(self, handover: Handover) -> None:
        assert handover.grad is not None
        self._own = handover.own
        self._storage = None if self._own else weakref.ref(handover.grad.untyped_storage())

    def handover(self, grad: Tensor, others: Sequence[Tensor]) -> Handover:
        """A block that passes its gradient on unchanged makes nobody an owner, nor does one that gives the
        same memory to another of its inputs: `others` are the gradients found beside."""
        alive = None if self._storage is None else self._storage()
        mine = grad.untyped_storage()._cdata
        passed_on = not self._own and alive is not None and alive._cdata == mine
        return Handover(grad, not passed_on and all(g.untyped_storage()._cdata != mine for g in others))


def receiving(y: Tensor, arrived: Handover) -> Tensor:
    """y, the result of an autograd.Function, so that its backward finds the gradient in `arrived`."""
    return cast(Tensor, _Receive.apply(y, arrived))  # type: ignore[no-untyped-call]


def pull(y: Tensor, wrt: Sequence[Tensor], handover: Handover) -> list[Tensor]:
    """torch.autograd.grad, zeros where there is none; y's gradient goes when y's history has used it."""
    if not y.requires_grad:
        handover.take()
        return [torch.zeros_like(t) for t in wrt]
    with torch.enable_grad():
        end = cast(Tensor, _Give.apply(y, handover))  # type: ignore[no-untyped-call]
    return list(torch.autograd.grad(end, wrt, end.detach(), materialize_grads=True))


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(y: Tensor, arrived: Handover) -> Tensor:
        return y.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.arrived = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None]:
        (grad,) = grads
        ctx.arrived.grad = None  # that of a backward that failed
        # what may be differentiated once more, only autograd knows how to
        if grad is None or torch.is_grad_enabled() or levels():
            return grad, None
        ctx.arrived.grad = grad
        return grad.new_zeros(()).expand(grad.shape), None


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(y: Tensor, handover: Handover) -> Tensor:
        return y.new_zeros(())  # never read

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.handover = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return ctx.handover.take(), None
