"""What a function brings along without being given it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor


def check_no_grad(name: str, tensors: Sequence[Any]) -> None:
    for t in tensors:
        if isinstance(t, Tensor) and t.requires_grad:
            raise ValueError(
                f"{name} must hold no tensor that requires a gradient, got one of shape {tuple(t.shape)}. "
                f"Pass it through x or layers, or detach it."
            )


def needs_grad(tensors: Sequence[Any]) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def held(block: Any) -> list[Any]:
    """What `block` brings along without being given it, as far as can be seen from outside."""
    block = getattr(block, "_torchdynamo_orig_callable", block)
    if isinstance(block, partial):
        return [*held(block.func), *pytree.tree_leaves((block.args, block.keywords))]
    owner = getattr(block, "__self__", block)
    if isinstance(owner, torch.nn.Module):
        return list(owner.parameters())
    return pytree.tree_leaves([cell.cell_contents for cell in getattr(block, "__closure__", None) or ()])
