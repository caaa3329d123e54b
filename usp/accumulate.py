"""Gradient accumulation: one step's batch worked on in parts, with the result of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from usp.data import Batch, Shard


def split_batch(batch: Batch, num_parts: int) -> list[Batch]:
    """`num_parts` batches of equally many rows. Raises ValueError when the rows cannot be dealt evenly."""
    num_rows = batch.tokens.shape[0]
    if num_parts < 1 or num_rows % num_parts:
        raise ValueError(
            f"batch size={num_rows} must be a multiple of the parts it is worked on in, got {num_parts}. "
            f"Add rows, or use fewer parts."
        )
    size = num_rows // num_parts
    parts = [slice(i * size, (i + 1) * size) for i in range(num_parts)]
    return [Batch(*(None if field is None else field[part] for field in batch)) for part in parts]  # type: ignore[arg-type]


def accumulate(
    loss_and_grads: Callable[[Any, Shard], tuple[Tensor, Any]], params: Any, shards: Sequence[Shard]
) -> tuple[Tensor, Any]:
    """Loss and gradients of all shards together, as if they were one batch.

    `loss_and_grads(params, shard)` comes from `value_and_grad` of a loss that divides a sum over tokens by
    `shard.num_valid`. Each shard gets the count of all of them, so every token weighs the same however many
    valid ones its part has; the mean of the parts' means would not do that. Gradients are summed in float32
    or wider and returned in their own dtype; those of a part are let go before the next. Communicates what
    `loss_and_grads` does, for each shard.
    """
    if not shards:
        raise ValueError("shards must hold at least one, got none. Pass the parts of one step's batch.")
    if len(shards) == 1:
        return loss_and_grads(params, shards[0])
    num_valid = torch.stack([shard.num_valid for shard in shards]).sum()
    loss, grads = loss_and_grads(params, shards[0]._replace(num_valid=num_valid))
    sums, tree = pytree.tree_flatten(grads)
    del grads
    dtypes = [t.dtype if isinstance(t, Tensor) else None for t in sums]
    for i, dtype in enumerate(dtypes):  # one leaf at a time is there twice
        if dtype is not None:
            sums[i] = sums[i].to(torch.promote_types(dtype, torch.float32), copy=True)
    for shard in shards[1:]:
        value, grads = loss_and_grads(params, shard._replace(num_valid=num_valid))
        loss = loss + value
        for total, grad, dtype in zip(sums, pytree.tree_leaves(grads), dtypes, strict=True):
            if dtype is not None:
                total.add_(grad)
        grads = grad = None
    for i, dtype in enumerate(dtypes):
        if dtype is not None:
            sums[i] = sums[i].to(dtype)
    return loss, pytree.tree_unflatten(sums, tree)
