"""`tiled`: a function of each token alone, over tiles of tokens, computed again for its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from usp.scan.ambient import Autocast, Random
from usp.scan.closure import check_no_grad, held


def tiled(
    fn: Callable[[Tensor, Any], Tensor],
    x: Tensor,
    weights: Any,
    *,
    tile: int,
    value: bool = True,
    own_grad: bool = False,
    again: Callable[[Tensor, Any], Tensor] | None = None,
) -> Tensor:
    """fn(x, weights), where fn treats every token alike: x [..., D] -> [..., E].

    fn sees at most `tile` tokens at a time, [tile, D], of all leading dimensions laid end to end; the number
    of tiles depends on shapes alone, so ranks cannot disagree. Nothing but x and `weights`, a pytree of
    tensors in use, is kept: the backward runs fn again, tile by tile, and sums the gradients of weights in
    float32 or wider. value=False, for E = D, leaves the result zero: for a re-run of which only the gradient
    counts. own_grad=True: nobody else reads the result's gradient, and x's is written over it, tile by tile.
    `again`: run by the backward in place of fn, with its gradients and any value.
    First derivatives in reverse mode only. Communicates what fn does, once more in the backward. The idea:
    ALST's tiled MLP (arXiv 2506.13996). Raises ValueError when fn holds a tensor that needs a gradient.
    """
    if tile < 1:
        raise ValueError(f"tile={tile} must be at least 1. Give the number of tokens per tile.")
    if not torch.compiler.is_compiling():
        check_no_grad("fn", [*held(fn), *held(again or fn)])
    leaves, tree = pytree.tree_flatten(weights)
    flat = x.reshape(-1, x.shape[-1])
    out: Any = _Tiled.apply(_Job(fn, again or fn, tree, tile, value, own_grad), flat, *leaves)  # type: ignore[no-untyped-call]
    return cast(Tensor, out.view(*x.shape[:-1], out.shape[-1]))


@dataclass
class _Job:
    fn: Callable[[Tensor, Any], Tensor]
    again: Callable[[Tensor, Any], Tensor]
    tree: pytree.TreeSpec
    tile: int
    value: bool
    own_grad: bool
    autocast: Autocast = field(default_factory=Autocast)
    random: Random | None = None

    def run(self, fn: Callable[[Tensor, Any], Tensor], x_TD: Tensor, leaves: list[Any]) -> Tensor:
        return fn(x_TD, pytree.tree_unflatten(leaves, self.tree))

    def tiles(self, num_tokens: int) -> Iterator[slice]:
        """One at least, empty, where there is no token."""
        for start in range(0, max(num_tokens, 1), self.tile):
            yield slice(start, min(start + self.tile, num_tokens))


class _Tiled(torch.autograd.Function):
    """Runs below every torch.func level, on plain tensors."""

    @staticmethod
    def forward(job: _Job, x_TD: Tensor, *leaves: Any) -> Tensor:
        num_tokens = x_TD.shape[0]
        job.random = Random(x_TD.device)
        out: Tensor | None = None
        with torch.no_grad():
            if not job.value:
                return x_TD.new_zeros(()).expand(num_tokens, x_TD.shape[1])  # takes no memory
            for part in job.tiles(num_tokens):
                y = job.run(job.fn, x_TD[part], list(leaves))
                if out is None:
                    out = y.new_empty(num_tokens, *y.shape[1:])
                out[part] = y
        assert out is not None
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.job, x, *leaves = inputs
        ctx.present = [t is not None for t in leaves]
        ctx.floating = [isinstance(t, Tensor) and t.is_floating_point() for t in leaves]
        ctx.save_for_backward(x, *(t for t in leaves if t is not None))

    @staticmethod
    def backward(ctx: Any, *grads_out: Any) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        present = iter(saved)
        leaves = [next(present) if there else None for there in ctx.present]
        want_x, *needed = ctx.needs_input_grad[1:]
        want = [bool(n) and f for n, f in zip(needed, ctx.floating, strict=True)]
        grads = _TiledBackward.apply(ctx.job, bool(want_x), want, grads_out[0], x, *leaves)  # type: ignore[no-untyped-call]
        found = iter(grads)
        return (None, next(found) if want_x else None, *(next(found) if w else None for w in want))


class _TiledBackward(torch.autograd.Function):
    """The backward pass as a forward, with plain autograd inside."""

    @staticmethod
    def forward(
        job: _Job, want_x: bool, want: list[bool], grad: Tensor, x_TD: Tensor, *leaves: Any
    ) -> tuple[Tensor, ...]:
        grad_x: Tensor | None = None
        if want_x:
            alike = grad.is_contiguous() and (grad.shape, grad.dtype) == (x_TD.shape, x_TD.dtype)
            grad_x = grad.detach() if job.own_grad and alike else torch.empty_like(x_TD)
        sums: list[Tensor] = []
        chosen = [t for t, w in zip(leaves, want, strict=True) if w]
        assert job.random is not None
        with job.random.replayed():
            for part in job.tiles(x_TD.shape[0]):
                with torch.enable_grad(), job.autocast.entered():
                    x = x_TD[part].detach().requires_grad_(want_x)
                    own = [t.detach().requires_grad_() if w else t for t, w in zip(leaves, want, strict=True)]
                    y = job.run(job.again, x, own)
                wrt = [x] * want_x + [t for t, w in zip(own, want, strict=True) if w]
                found = list(torch.autograd.grad(y, wrt, grad[part], materialize_grads=True))
                del y
                if grad_x is not None:
                    grad_x[part] = found.pop(0)
                if not sums:
                    sums = [g.to(torch.promote_types(g.dtype, torch.float32), copy=True) for g in found]
                else:
                    for total, g in zip(sums, found, strict=True):
                        total.add_(g)
        done = [total.to(t.dtype) for total, t in zip(sums, chosen, strict=True)]
        return (*([grad_x] if grad_x is not None else []), *done)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise RuntimeError("tiled gives first derivatives only. Call fn itself for higher ones.")
