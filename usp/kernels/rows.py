"""Rows as kernels take them: batches where segments are of one length, boundaries on the device where not."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from usp.kernels.interface import Segments


def num_batch(segments: Segments) -> int | None:
    """How many segments, when they are of one length and can be run as a batch; else None."""
    for cu in (segments.cu_q, segments.cu_k):
        if any(b - a != cu[1] - cu[0] for a, b in pairwise(cu)):
            return None
    return len(segments.cu_q) - 1


def batched(t: Tensor, batch: int) -> Tensor:
    """[batch * S, N, H] -> [batch, S, N, H], a view."""
    return torch.unflatten(t, 0, (batch, -1))


def lse_flat(lse_BNS: Tensor) -> Tensor:
    """[batch, N, S] -> [N, batch * S], contiguous."""
    return lse_BNS.transpose(0, 1).flatten(1).contiguous()


def lse_batched(lse_NT: Tensor, batch: int) -> Tensor:
    """[N, batch * S] -> [batch, N, S], contiguous."""
    return torch.unflatten(lse_NT, 1, (batch, -1)).transpose(0, 1).contiguous()


class Bounds(NamedTuple):
    """Boundaries of queries and keys on the device, and the longest segment of each."""

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int


def bounds(segments: Segments, device: torch.device) -> Bounds:
    """What a kernel for segments of any length is given."""
    cu_q, cu_k = segments.cu_q, segments.cu_k
    longest_q, longest_k = (max(b - a for a, b in pairwise(cu)) for cu in (cu_q, cu_k))
    return Bounds(_on_device(cu_q, device), _on_device(cu_k, device), longest_q, longest_k)


@lru_cache(maxsize=32)
def _on_device(cu: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 on a device, through pinned memory so that nothing waits; made once for all layers.

    For use on the stream that computes: a stream beside it would have to wait for the copy.
    """
    return torch.tensor(cu, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
