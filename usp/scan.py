"""`scan`: run one block over a stack of layers, and decide what is remembered for the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor

REMAT = ("none", "full")


def scan(
    block: Callable[..., Tensor], x: Tensor, layers: Sequence[Any], *consts: Any, remat: str = "none"
) -> Tensor:
    """x = block(x, layer, *consts) for every layer, the counterpart of `lax.scan` with `jax.checkpoint`.

    `layers` are pytrees of tensors and None, all alike; `consts` are tensors or None and get no gradient.
    remat="none" keeps what autograd keeps; "full" keeps each block's input and runs the block again in the
    backward (saved-tensor hooks, and so `torch.utils.checkpoint`, are refused under torch.func). "full" gives
    first derivatives in reverse mode only, and only to what `block` is given: it must not close over tensors
    that need a gradient. Communicates what `block` does, once more in the backward for "full". Raises
    ValueError for another `remat`, and for a const or closed-over tensor that asks for a gradient it would
    not get.
    """
    if remat not in REMAT:
        raise ValueError(f"remat={remat!r} must be one of {', '.join(REMAT)}. Choose one of them.")
    _check_no_grad("consts", consts)
    if remat == "none" or not layers:
        for layer in layers:
            x = block(x, layer, *consts)
        return x
    if not torch.compiler.is_compiling():
        _check_no_grad("block", _held(block))
    flat, tree = pytree.tree_flatten(tuple(layers))
    return cast(Tensor, _Scan.apply(block, tree, len(flat), x, *flat, *consts)[0])  # type: ignore[no-untyped-call]


def _check_no_grad(name: str, tensors: Sequence[Any]) -> None:
    for t in tensors:
        if isinstance(t, Tensor) and t.requires_grad:
            raise ValueError(
                f"{name} must hold no tensor that requires a gradient, got one of shape {tuple(t.shape)}. "
                f"Pass it through x or layers, or detach it."
            )


def _held(block: Any) -> list[Any]:
    """What `block` brings along without being given it, as far as can be seen from outside."""
    if isinstance(block, partial):
        return [*_held(block.func), *pytree.tree_leaves((block.args, block.keywords))]
    owner = getattr(block, "__self__", block)
    if isinstance(owner, torch.nn.Module):
        return list(owner.parameters())
    return pytree.tree_leaves([cell.cell_contents for cell in getattr(block, "__closure__", None) or ()])


def _unpack(tree: Any, num_leaves: int, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return pytree.tree_unflatten(list(tensors[:num_leaves]), tree), tuple(tensors[num_leaves:])


def _wants_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


class _Scan(torch.autograd.Function):
    """Runs below every torch.func level, on plain tensors. Outputs: the result, then every block's input."""

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
        ctx.set_materialize_grads(False)  # no zeros for the gradients of all inputs
        ctx.present = [t is not None for t in rest]
        ctx.wanted = [_wants_grad(t) for t in rest[: ctx.num_leaves]]
        ctx.num_inputs = len(output)
        ctx.save_for_backward(x, *output[1:], *(t for t in rest if t is not None))

    @staticmethod
    def backward(ctx: Any, *grads_out: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        inputs, present = saved[: ctx.num_inputs], iter(saved[ctx.num_inputs :])
        rest = [next(present) if there else None for there in ctx.present]
        grads = _ScanBackward.apply(  # type: ignore[no-untyped-call]
            ctx.block, ctx.tree, ctx.num_leaves, ctx.num_inputs, grads_out[0], *inputs, *rest
        )
        leaves = iter(grads[1:])
        grads_rest = [next(leaves) if wanted else None for wanted in ctx.wanted]
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
                leaves = [t.detach().requires_grad_() if _wants_grad(t) else t for t in leaves]
                y = block(x, pytree.tree_unflatten(leaves, layer_tree), *consts)
                wanted = [t for t in leaves if _wants_grad(t)]
                # what the block did not use has a gradient of zero, as without remat
                grad, *layer_grads = torch.autograd.grad(y, [x, *wanted], grad, materialize_grads=True)
            grads.append(layer_grads)
        return (grad, *(g for layer_grads in reversed(grads) for g in layer_grads))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise RuntimeError("remat='full' gives first derivatives only. Use remat='none' for higher ones.")
