"""Which heads each rank gets: query heads in contiguous runs that differ by one at most, and the kv heads
that they attend with, so that a kv head needed by several ranks is replicated."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Deal(NamedTuple):
    """Heads of one rank: query heads [q_start, q_stop), kv heads [kv_start, kv_stop)."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int


def deal_heads(num_heads: int, num_kv_heads: int, parts: int) -> tuple[Deal, ...]:
    """Heads of each of `parts` ranks. Raises ValueError when groups do not divide."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} must be a multiple of num_kv_heads, got num_kv_heads={num_kv_heads}. "
            f"Check the model configuration."
        )
    group = num_heads // num_kv_heads
    deals, start = [], 0
    for i in range(parts):
        stop = start + num_heads // parts + (i < num_heads % parts)
        kv_start = start // group
        deals.append(Deal(start, stop, kv_start, -(-stop // group) if stop > start else kv_start))
        start = stop
    return tuple(deals)


def with_equal_groups(k: Tensor, v: Tensor, deal: Deal, group: int) -> tuple[Tensor, Tensor]:
    """Received kv heads repeated where needed, so that all serve equally many of this rank's query heads.

    k, v [B, S, K', H] hold the kv heads of `deal`; `group` query heads share one in the whole model.
    """
    order = _local_groups(deal, group)
    if order is None:
        return k, v
    dtype, wide = k.dtype, torch.promote_types(k.dtype, torch.float32)
    # slices, not an index tensor: making one on a GPU would wait for it
    k, v = (torch.cat([t[:, :, i : i + 1] for i in order], 2) for t in (k.to(wide), v.to(wide)))
    return k.to(dtype), v.to(dtype)


def _local_groups(deal: Deal, group: int) -> list[int] | None:
    """Received kv head of each slot so that all serve equally many query heads; None if as received."""
    if deal.q_start == deal.q_stop:
        return None
    used = [head // group - deal.kv_start for head in range(deal.q_start, deal.q_stop)]
    runs = [used.count(kv) for kv in range(deal.kv_stop - deal.kv_start)]
    size = next(n for n in range(min(runs), 0, -1) if all(run % n == 0 for run in runs))
    return None if all(run == size for run in runs) else used[::size]
