"""Tensors that are columns of one buffer: what one all-to-all brings, and what the next one sends.

q, k and v arrive together, of each token one tensor's heads after the other's, and their gradients go back
together in the same order. A kernel that writes gradients where they are sent from saves a copy of them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from usp.levels import is_batched, levels

Heads = Sequence[tuple[int, int]]
"""(number, size) of each tensor's heads."""


def columns(joined: Tensor, heads: Heads) -> list[Tensor]:
    """[T, sum of N * H] -> views [T, N, H], for the (N, H) of each of `heads`, in order.

    Gradients that lie as `like_columns` lays them out reach `joined` without a copy. Communicates nothing.
    """
    if torch.compiler.is_compiling() or levels() or not joined.requires_grad:
        return _views(joined, heads)
    return list(_Columns.apply(joined, tuple(heads)))  # type: ignore[no-untyped-call]


def like_columns(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Memory like that of tensors [T, N, H]: columns of one buffer where these are, else each for itself."""
    whole = _joined(tensors)
    if whole is None:
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    return _views(torch.empty_like(whole), [(t.shape[1], t.shape[2]) for t in tensors])


def _views(joined: Tensor, heads: Heads) -> list[Tensor]:
    parts = torch.split(joined, [num * size for num, size in heads], 1)
    return [part.view(joined.shape[0], *each) for part, each in zip(parts, heads, strict=True)]


def _joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """The [T, sum of N * H] whose columns [T, N, H] these are, all of them and in order; None: of none."""
    if torch.compiler.is_compiling() or any(type(t) is not Tensor or is_batched(t) for t in tensors):
        return None  # memory of which nothing can be said
    first, width = tensors[0], sum(t.shape[1] * t.shape[2] for t in tensors)
    start, memory = first.storage_offset(), first.untyped_storage().data_ptr()
    for t in tensors:
        like = t.shape[0] == first.shape[0] and t.dtype == first.dtype
        there = t.untyped_storage().data_ptr() == memory and t.storage_offset() == start
        if not (like and there and t.stride() == (width, t.shape[2], 1)) or not memory:
            return None
        start += t.shape[1] * t.shape[2]
    return first.as_strided((first.shape[0], width), (width, 1))


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(joined: Tensor, heads: tuple[tuple[int, int], ...]) -> tuple[Tensor, ...]:
        return tuple(_views(joined, heads))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.heads = inputs[1]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        return tuple(_views(tangents[0], ctx.heads))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        # of a view of the buffer a second derivative would know the first tensor only
        whole = None if torch.is_grad_enabled() else _joined(grads)
        if whole is None:
            whole = torch.cat([g.reshape(g.shape[0], g.shape[1] * g.shape[2]) for g in grads], 1)
        return whole, None
