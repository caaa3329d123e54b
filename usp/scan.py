"""`scan`: run one block over a stack of layers, and decide what is remembered for the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

REMAT = ("none", "full")


def scan(block: Callable[..., Tensor], x: Tensor, layers: Sequence[Any], *consts: Any, remat: str = "none") -> Tensor:
    """x = block(x, layer, *consts) for every layer, the counterpart of `lax.scan` with `jax.checkpoint`.

    `layers` are pytrees of tensors and None, all alike; `consts` are tensors or None and get no gradient.
    remat="none" keeps what autograd keeps; "full" keeps each block's input and runs the block again in the backward
    (saved-tensor hooks, and so `torch.utils.checkpoint`, are refused under torch.func). "full" gives first
    derivatives only. Communicates what `block` does, once more in the backward for "full". ValueError for another
    `remat`.
    """
    if remat not in REMAT:
        raise ValueError(f"remat={remat!r} must be one of {', '.join(REMAT)}. Choose one of them.")
    if remat == "none" or not layers:
        for layer in layers:
            x = block(x, layer, *consts)
        return x
    flat, tree = pytree.tree_flatten(tuple(layers))
    return _Scan.apply(block, tree, len(flat), x, *flat, *consts)[0]


def _unpack(tree: Any, num_leaves: int, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return pytree.tree_unflatten(list(tensors[:num_leaves]), tree), tuple(tensors[num_leaves:])


class _Scan(torch.autograd.Function):
    """Runs below every torch.func level, on plain tensors. Outputs: the result, then the input of every block."""

    @staticmethod
    def forward(block: Any, tree: Any, num_leaves: int, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        layers, consts = _unpack(tree, num_leaves, rest)
        inputs = []
        with torch.no_grad():
            for layer in layers:
                inputs.append(x)
                x = block(x, layer, *consts)
        return (x, *inputs[1:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.block, ctx.tree, ctx.num_leaves, x, *rest = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.present = [t is not None for t in rest]
        ctx.num_inputs = len(output)
        ctx.save_for_backward(x, *output[1:], *(t for t in rest if t is not None))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors
        inputs, present = saved[: ctx.num_inputs], iter(saved[ctx.num_inputs :])
        rest = [next(present) if there else None for there in ctx.present]
        grads = _ScanBackward.apply(ctx.block, ctx.tree, ctx.num_leaves, ctx.num_inputs, grad, *inputs, *rest)
        leaves = iter(grads[1:])
        grads_rest = [next(leaves) if there else None for there in ctx.present[: ctx.num_leaves]]
        return (None, None, None, grads[0], *grads_rest, *(None for _ in ctx.present[ctx.num_leaves :]))


class _ScanBackward(torch.autograd.Function):
    """The backward pass as a forward, so that it too runs on plain tensors with plain autograd inside."""

    @staticmethod
    def forward(
        block: Any, tree: Any, num_leaves: int, num_inputs: int, grad: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        inputs = rest[:num_inputs]
        layers, consts = _unpack(tree, num_leaves, rest[num_inputs:])
        grads: list[list[Tensor]] = []
        for x, layer in zip(reversed(inputs), reversed(layers), strict=True):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                leaves, layer_tree = pytree.tree_flatten(layer)
                leaves = [None if t is None else t.detach().requires_grad_() for t in leaves]
                y = block(x, pytree.tree_unflatten(leaves, layer_tree), *consts)
                wanted = [t for t in leaves if t is not None]
                grad, *layer_grads = torch.autograd.grad(y, [x, *wanted], grad)
            grads.append(layer_grads)
        return (grad, *(g for layer_grads in reversed(grads) for g in layer_grads))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        raise RuntimeError("remat='full' gives first derivatives only. Use remat='none' for higher ones.")
