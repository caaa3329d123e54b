"""`value_and_grad` without a graph kept for a second derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from usp.levels import levels


def value_and_grad(
    fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Function that returns `fn`'s value and its gradient with respect to the arguments `argnums`.

    Like `jax.value_and_grad`: arguments are pytrees of floating-point tensors; gradients have their
    structure, None where no tensor is; with `has_aux`, `fn` returns (value, aux) and so does the result's
    first entry. Uses `torch.func.vjp` and frees the graph as it goes; for higher derivatives apply
    torch.func's transforms to `fn`, as a function of the tensors alone: they take no tree that holds None.
    On several ranks each returns the gradient of the sum of all ranks' values, as far as its own shards go
    (see `usp.mesh.dual`). Raises ValueError when the value is not a scalar, or inside a torch.func transform
    that differentiates (its derivative would be zero).
    """

    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        if _differentiated():
            raise ValueError(
                "value_and_grad must be outermost, got a call inside torch.func.grad, vjp or jvp. Use "
                "torch.func.grad_and_value for higher derivatives, on a function of the tree's tensors."
            )
        tensors, join = _split(tuple(args[n] for n in numbers))
        join_aux: list[Callable[..., Any]] = []

        def of_tensors(*tensors: Any) -> Any:
            full = list(args)
            for number, value in zip(numbers, join(tensors), strict=True):
                full[number] = value
            if not has_aux:
                return fn(*full, **kwargs)
            value, aux = fn(*full, **kwargs)
            tensors_aux, rebuild = _split(aux)  # torch.func lets only tensors out
            join_aux.append(rebuild)
            return value, tensors_aux

        value, vjp_fn, *aux = torch.func.vjp(of_tensors, *tensors, has_aux=has_aux)
        if value.dim() != 0:
            raise ValueError(
                f"value must be a scalar, got shape {tuple(value.shape)}. Sum or average it in fn."
            )
        with torch.no_grad():
            flat = vjp_fn(torch.ones_like(value), retain_graph=False, create_graph=False)
        grads = join(flat, others=False)
        grads = grads[0] if isinstance(argnums, int) else grads
        value = value.detach()
        return ((value, join_aux[0](aux[0])) if has_aux else value), grads

    return wrapped


_HERE = object()


def _split(tree: Any) -> tuple[list[torch.Tensor], Callable[..., Any]]:
    """The tensors of a pytree, and `join`, which puts others in their places (None elsewhere on demand)."""
    leaves, spec = pytree.tree_flatten(tree)
    kept = [_HERE if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def join(tensors: Sequence[Any], *, others: bool = True) -> Any:
        new = iter(tensors)
        full = [next(new) if leaf is _HERE else leaf if others else None for leaf in kept]
        return pytree.tree_unflatten(full, spec)

    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], join


def _differentiated() -> bool:
    """Whether a differentiating torch.func transform is under way. (torch.compile traces its own levels.)"""
    if torch.compiler.is_compiling():
        return False
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return any(
        level.key() in (functorch.TransformType.Grad, functorch.TransformType.Jvp) for level in levels()
    )
