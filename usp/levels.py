"""Which torch.func transforms are at work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def levels() -> list[Any]:
    """The transforms under way, outermost first. (torch.compile traces its own.)"""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return list(functorch.get_interpreter_stack() or [])


def one_gradient() -> bool:
    """Whether exactly one transform is under way, and it is a reverse-mode derivative."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    found = levels()
    return len(found) == 1 and bool(found[0].key() == functorch.TransformType.Grad)


def is_batched(t: Tensor) -> bool:
    """Whether t stands for many, under torch.func.vmap or for autograd's `is_grads_batched`."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return bool(functorch.is_batchedtensor(t) or functorch.is_legacy_batchedtensor(t))


def has_tangent(*tensors: Tensor) -> bool:
    """Whether one of them is a dual number of `torch.autograd.forward_ad`."""
    duals: Any = forward_ad
    return any(duals.unpack_dual(t).tangent is not None for t in tensors)


def saving_hooks() -> bool:
    """Whether `saved_tensors_hooks` see, now, what autograd saves."""
    top = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
    return top(True) is not None
