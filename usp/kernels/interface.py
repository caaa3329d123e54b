"""What an attention kernel is: output and log-sum-exp forward, an explicit backward, and what it can take."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

PACKED, WINDOW, SOFTCAP, V_SIZE = "packed", "window", "softcap", "v_size"
FEATURES = {
    PACKED: "segments of unequal length",
    WINDOW: "a band of keys other than causal over equal lengths",
    SOFTCAP: "scores capped by softcap * tanh(score / softcap)",
    V_SIZE: "a head size of v that differs from that of q and k",
}


class Segments(NamedTuple):
    """Which rows attend to which, for one run of a kernel.

    Segment i joins the query rows cu_q[i]:cu_q[i+1] with the key rows cu_k[i]:cu_k[i+1], which lie end to end
    and cover all rows; both are host integers, so that no kernel waits for the device. Rows are aligned at
    the END of a segment: of Lq queries and Lk keys, query i sees key j when
    i + Lk - Lq - left <= j <= i + Lk - Lq + right; None: no bound. So right=0 is causal. Every query must see
    at least one key.
    """

    cu_q: tuple[int, ...]
    cu_k: tuple[int, ...]
    left: int | None
    right: int | None
    scale: float
    softcap: float = 0.0  # 0: none

    @property
    def features(self) -> frozenset[str]:
        """What a kernel must be able to do for this."""
        lengths_q = {b - a for a, b in pairwise(self.cu_q)}
        lengths_k = {b - a for a, b in pairwise(self.cu_k)}
        needed = set()
        if len(lengths_q) > 1 or len(lengths_k) > 1:
            needed.add(PACKED)
        if (
            self.left is not None
            or self.right not in (None, 0)
            or (self.right == 0 and self.cu_q != self.cu_k)
        ):
            needed.add(WINDOW)
        if self.softcap:
            needed.add(SOFTCAP)
        return frozenset(needed)


class Kernel(NamedTuple):
    """One implementation. T query rows, U key rows; N query heads a multiple of K kv heads; sizes H and Hv.

    forward(q [T, N, H], k [U, K, H], v [U, K, Hv], segments) -> o [T, N, Hv] in the type of q,
    lse [N, T] float32 (float64 for float64), the log-sum-exp over the keys of each row's scores, contiguous.
    backward(do, q, k, v, o, lse, segments) -> dq, dk, dv in the types of q, k, v. o and lse may be those of
    all the keys a row attends to, of which these are a part: the probabilities are exp(score - lse), and the
    sum that the softmax's derivative subtracts is do . o.
    `sizes`: whether the kernel takes these head sizes (q and k's, v's).
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    features: frozenset[str]
    sizes: Callable[[int, int], bool]
    forward: Callable[[Tensor, Tensor, Tensor, Segments], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    available: Callable[[torch.device], bool] = lambda device: True
