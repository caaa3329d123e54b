"""Head sizes that a kernel does not take, by columns of zeros: exact, at the price of the work on them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from torch import Tensor
from torch.nn.functional import pad

from usp.kernels.interface import V_SIZE, Kernel, Segments

_MULTIPLES = (1, 8, 16, 32, 64, 128)


def _candidates(size: int, v_size: int, free: bool) -> Iterator[tuple[int, int]]:
    """Sizes no smaller than these, best first; `free`: the two may differ."""
    for m in _MULTIPLES:
        up, v_up = -(-size // m) * m, -(-v_size // m) * m
        if free:
            yield up, v_up
        yield max(up, v_up), max(up, v_up)


@lru_cache(maxsize=64)
def padded(kernel: Kernel, size: int, v_size: int) -> Kernel | None:
    """`kernel` itself where it takes head sizes `size` (q, k) and `v_size` (v), else with zeros around it.

    Zeros in q and k add nothing to a score, and the scale is in the segments; zeros in v give columns of
    zeros in o, which are cut. None: no padded size is one that the kernel takes. Cached, so that the same
    sizes give the same object.
    """
    for to in _candidates(size, v_size, V_SIZE in kernel.features):
        if kernel.sizes(*to):
            return kernel if to == (size, v_size) else _wrapped(kernel, (size, v_size), to)
    return None


def _wrapped(kernel: Kernel, sizes: tuple[int, int], to: tuple[int, int]) -> Kernel:
    more, v_more = to[0] - sizes[0], to[1] - sizes[1]

    def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        o, lse = kernel.forward(pad(q, (0, more)), pad(k, (0, more)), pad(v, (0, v_more)), segments)
        return o[..., : sizes[1]].contiguous(), lse

    def backward(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, v, o = (pad(t, (0, v_more)) for t in (do, v, o))
        dq, dk, dv = kernel.backward(do, pad(q, (0, more)), pad(k, (0, more)), v, o, lse, segments)
        return dq[..., : sizes[0]], dk[..., : sizes[0]], dv[..., : sizes[1]]

    return kernel._replace(
        sizes=lambda size, v_size: (size, v_size) == sizes, forward=forward, backward=backward
    )
