"""The scan as an autograd.Function whose forward and backward run below every torch.func level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from usp.scan.handover import Handover, receiving
from usp.scan.run import Run, Wanted


def apply_scan(run: Run, x: Tensor, leaves: Sequence[Any], consts: Sequence[Any]) -> Tensor:
    y, *_ = cast("tuple[Tensor, ...]", _Scan.apply(run, len(leaves), x, *leaves, *consts))  # type: ignore[no-untyped-call]
    return receiving(y, run.arrived)


class _Scan(torch.autograd.Function):
    """On plain tensors. Outputs: the result, then what is to be saved."""

    @staticmethod
    def forward(run: Run, num_leaves: int, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            y = run.forward(x, rest[:num_leaves], rest[num_leaves:])
        y = y.clone() if y is x else y  # an input must not be handed out as a result
        return (y, *run.memory.outputs())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.run, ctx.num_leaves, x, *rest = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # no zeros for the gradients of what is only saved
        ctx.present = [t is not None for t in rest]
        ctx.floating = [isinstance(t, Tensor) and t.is_floating_point() for t in rest]
        own = [x] if ctx.run.memory.keeps_input else []
        ctx.num_saved = len(own) + len(output) - 1
        ctx.save_for_backward(*own, *output[1:], *(t for t in rest if t is not None))

    @staticmethod
    def backward(ctx: Any, *grads_out: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        present = iter(saved[ctx.num_saved :])
        rest = [next(present) if there else None for there in ctx.present]
        want_x, *want = (bool(need) for need in ctx.needs_input_grad[2:])
        want = [w and f for w, f in zip(want[: ctx.num_leaves], ctx.floating, strict=False)]
        if grads_out[0] is None or not (want_x or any(want)):
            return (None,) * (3 + len(rest))
        wanted = Wanted(want_x, ctx.run.split(want))
        # an argument would be held until the last layer is done
        grad = None if ctx.run.arrived.grad is not None else grads_out[0]
        grads = _ScanBackward.apply(  # type: ignore[no-untyped-call]
            ctx.run, ctx.num_leaves, ctx.num_saved, wanted, grad, *saved[: ctx.num_saved], *rest
        )
        found = iter(grads)
        grad_x = next(found) if want_x else None
        consts = (None,) * (len(rest) - ctx.num_leaves)
        return (None, None, grad_x, *(next(found) if w else None for w in want), *consts)


class _ScanBackward(torch.autograd.Function):
    """The backward pass as a forward, so that it too runs on plain tensors with plain autograd inside."""

    @staticmethod
    def forward(
        run: Run, num_leaves: int, num_saved: int, wanted: Wanted, grad: Tensor | None, *tensors: Any
    ) -> tuple[Tensor, ...]:
        saved, rest = tensors[:num_saved], tensors[num_saved:]
        handover = Handover(run.arrived.take() if grad is None else grad)
        grad_x, grads = run.backward(handover, saved, rest[:num_leaves], rest[num_leaves:], wanted)
        found = [grad_x] if wanted.x else []
        return cast("tuple[Tensor, ...]", (*found, *(g for own in grads for g in own if g is not None)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise RuntimeError(
            "remat='full' gives first derivatives only, and so does 'attention'. "
            "Use remat='none' for higher ones."
        )
