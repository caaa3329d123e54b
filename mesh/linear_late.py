"""A linear map of several tensors whose start and end lie apart, in the forward and in the backward.

In the graph it is two nodes with one number between them, which carries no value: what travels is in a
`Journey`. Autograd runs the nodes that are ready from the last made to the first. So the gradients set out
when the second node has them, and are waited for when all is gone through that was computed since the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class LateOp(Protocol):
    """A linear map of several tensors, without the tensors."""

    def start(self, tensors: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        """Set out, on plain tensors; what is returned waits, once, and gives the results."""
        ...

    def transposed(self) -> LateOp: ...


class Journey:
    """One run of `op` on plain tensors. `start` and `wait` may be called again, to no effect.

    `late`: whether gradients may be under way while others are computed, else they are waited for at once.
    """

    def __init__(self, op: LateOp, *, late: bool) -> None:
        self.op, self.late = op, late
        self.back: Journey | None = None
        """That of the gradients, once they have set out."""
        self._tensors: Sequence[Tensor] = ()
        self._under_way: Callable[[], tuple[Tensor, ...]] | None = None
        self._results: tuple[Tensor, ...] | None = None

    def load(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def start(self) -> None:
        if self._tensors:
            tensors, self._tensors = self._tensors, ()
            self._under_way = self.op.start(tensors)

    def wait(self) -> None:
        self.start()
        if self._under_way is not None:
            finish, self._under_way = self._under_way, None
            self._results = finish()

    def results(self) -> tuple[Tensor, ...]:
        """Once."""
        self.wait()
        assert self._results is not None, "results() is called once"
        results, self._results = self._results, None
        return results


def depart(op: LateOp, tensors: Sequence[Tensor], *, late: bool) -> tuple[Journey, Tensor]:
    """A journey for `op`, not started yet, and the number that `arrive` takes.

    For plain autograd, or inside one reverse-mode transform of torch.func.
    """
    journey = Journey(op, late=late)
    return journey, cast(Tensor, _Depart.apply(journey, False, *tensors))  # type: ignore[no-untyped-call]


def arrive(journey: Journey, number: Tensor) -> tuple[Tensor, ...]:
    """The results. Starts the journey if nobody did."""
    return cast("tuple[Tensor, ...]", _Arrive.apply(journey, number))  # type: ignore[no-untyped-call]


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(journey: Journey, gradients: bool, *tensors: Tensor) -> Tensor:
        journey.load([t.detach() for t in tensors])
        if gradients:
            journey.start()
            if not journey.late:
                journey.wait()
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.journey = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return None, None, *arrive(ctx.journey.back, grads[0])


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(journey: Journey, number: Tensor) -> tuple[Tensor, ...]:
        return journey.results()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.journey = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        journey = ctx.journey
        journey.back = Journey(journey.op.transposed(), late=journey.late)
        return None, _Depart.apply(journey.back, True, *grads)  # type: ignore[no-untyped-call]
