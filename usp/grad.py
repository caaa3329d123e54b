"""`value_and_grad` without a graph kept for a second derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree


def value_and_grad(
    fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Function that returns `fn`'s value and its gradient with respect to the arguments `argnums`.

    Like `jax.value_and_grad`: arguments are pytrees of floating-point tensors; gradients have their structure, None where no tensor is;
    with `has_aux`, `fn` returns (value, aux) and so does the result's first entry. Uses `torch.func.vjp` and frees
    the graph as it goes; for higher derivatives apply torch.func's transforms to `fn`. On several ranks each
    returns the gradient of the sum of all ranks' values, as far as its own shards go (see `usp.mesh.dual`).
    Raises ValueError when the value is not a scalar.
    """

    def wrapped(*args: Any) -> tuple[Any, Any]:
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

        leaves, tree = pytree.tree_flatten(tuple(args[n] for n in numbers))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def filled(tensors: Sequence[Any], rest: list[Any]) -> Any:
            full = list(rest)
            for place, tensor in zip(places, tensors, strict=True):
                full[place] = tensor
            return pytree.tree_unflatten(full, tree)

        def of_tensors(*tensors: Any) -> Any:
            full = list(args)
            for number, value in zip(numbers, filled(tensors, leaves), strict=True):
                full[number] = value
            return fn(*full)

        tensors = [leaves[i] for i in places]
        value, vjp_fn, *aux = torch.func.vjp(of_tensors, *tensors, has_aux=has_aux)
        if value.dim() != 0:
            raise ValueError(f"value must be a scalar, got shape {tuple(value.shape)}. Sum or average it in fn.")
        with torch.no_grad():
            flat = vjp_fn(torch.ones_like(value), retain_graph=False, create_graph=False)
        grads = filled(flat, [None] * len(leaves))
        value = value.detach()
        return ((value, aux[0]) if has_aux else value), (grads[0] if isinstance(argnums, int) else grads)

    return wrapped
