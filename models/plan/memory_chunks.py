"""Bytes of attention by chunks of heads while its gradient is made, read off `usp.head_chunks.steps`."""

from __future__ import annotations

from collections.abc import Callable

from usp.head_chunks.deal import batches, comes, deal_chunks, needed
from usp.models.attended import attended
from usp.models.plan.local import Local


def chunks_moment(
    where: Local, head_chunks: int, item: int, wide: int, ring: Callable[[int, int], int]
) -> int:
    """The most beside x, its gradient, the result's and what attention kept: two chunks' exchanges.

    `item`: of the type that computes; `wide`: a float32 in units of it; `ring`: what a ring holds for a q and
    keys of so many bytes.
    """
    cfg, traded = where.cfg, where.axis is not None
    chunks = deal_chunks(
        cfg.num_heads, cfg.num_kv_heads, where.sizes[where.axis] if where.axis else 1, head_chunks
    )
    me, size = where.place if traded else 0, cfg.head_dim * item
    here, there = where.tokens(where.table.q), where.tokens(where.table.attn_x)

    def q(c: int, *, moved: bool) -> int:
        """q, or what is shaped like it, where attention runs, and on its way also where it is made."""
        heads = [d.q_stop - d.q_start for d in chunks[c].deals]
        return (heads[me] * here + moved * traded * sum(heads) * there) * size

    def kv(j: int, *, moved: bool) -> int:
        heads = [stop - start for start, stop in chunks[j].fresh]
        return 2 * (heads[me] * here + moved * traded * sum(heads) * there) * size

    most, travelling = 0, 0
    held: set[int] = set()
    summed: dict[int, int] = {}  # chunks that have added to the gradient of these kv heads
    for c in reversed(range(head_chunks)):
        held |= set(needed(chunks, c))
        own = 2 * q(c, moved=False) + sum(kv(j, moved=False) for j in held)
        keys = 2 * attended(chunks[c].deals[me], where.group).kv * here * size
        grads = (1 + wide) * (q(c, moved=False) + keys) + ring(q(c, moved=False), keys)
        sums = sum((1 if n == 1 else wide) * kv(j, moved=False) for j, n in summed.items())
        coming = 0
        if c:  # q, do and new kv heads
            new = set(needed(chunks, c - 1)) - held
            coming = 2 * q(c - 1, moved=True) + sum(kv(j, moved=True) for j in new)
        most = max(most, own + grads + sums + coming + travelling)
        for j, _ in batches(chunks, c, me):
            summed[j] = summed.get(j, 0) + 1
        travelling = q(c, moved=True) + (kv(c, moved=True) if comes(chunks[c]) else 0)
        held.discard(c)
        summed.pop(c, None)
    return most


def weights_sums(where: Local, item: int, wide: int) -> int:
    """Gradients of the weights: summed in float32, but for that of `wo`, whose product was one."""
    cfg = where.cfg
    rows = (cfg.num_heads * (1 + wide) + 2 * cfg.num_kv_heads * wide) * cfg.head_dim
    return rows * cfg.hidden_size * item
