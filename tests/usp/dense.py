"""What the tests compare against, and what they measure with: written apart from the code under test."""

from __future__ import annotations

import math
import weakref
from itertools import pairwise
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def visible(edges: list[int], *, causal: bool) -> Tensor:
    """[T, T] bool: which rows, laid end to end, may see which."""
    mask = torch.zeros(edges[-1], edges[-1], dtype=torch.bool)
    for start, stop in pairwise(edges):
        for i in range(start, stop):
            mask[i, start : (i + 1 if causal else stop)] = True
    return mask


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, edges: list[int], causal: bool = True, scale: float | None = None
) -> Tensor:
    """Softmax over one whole [T, T] matrix per head, as given. q [B, S, N, H], k and v [B, S, K, H]."""
    rows, length, num_heads, size = q.shape
    group = num_heads // k.shape[2]
    scale = 1 / math.sqrt(size) if scale is None else scale
    hidden = ~visible(edges, causal=causal)
    outs = []
    for head in range(num_heads):
        qh, kh, vh = (
            t[:, :, i].reshape(-1, size) for t, i in ((q, head), (k, head // group), (v, head // group))
        )
        scores = (scale * (qh @ kh.T)).masked_fill(hidden, -math.inf)
        weights = scores.exp() / scores.exp().sum(1, keepdim=True)
        outs.append((weights @ vh).view(rows, length, size))
    return torch.stack(outs, 2)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Watch(TorchDispatchMode):
    """Every operation's name, the largest tensor any of them made, and the peak of live bytes they made."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.largest = 0
        self.live = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in pytree.tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                self._hold(t.untyped_storage(), 0)  # not made here, though a view of it may be
        out = func(*args, **(kwargs or {}))
        self.ops.append(
            f"{func} {[tuple(t.shape) for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]}"
        )
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor):
                self.largest = max(self.largest, t.numel())
                self._hold(t.untyped_storage(), t.untyped_storage().nbytes())
        return out

    def _hold(self, storage: Any, size: int) -> None:
        key = storage._cdata
        if key in self._seen:
            return

        def gone(_: Any) -> None:
            del self._seen[key]
            self.live -= size

        self._seen[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)
