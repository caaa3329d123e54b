"""Which heads are taken through attention together, and which kv heads come with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from usp.deal import Deal, deal_heads

Range = tuple[int, int]


class Chunk(NamedTuple):
    """Heads of one chunk, of each rank: those it attends with, and the kv heads that come with this chunk."""

    deals: tuple[Deal, ...]
    fresh: tuple[Range, ...]


def deal_chunks(num_heads: int, num_kv_heads: int, parts: int, num_chunks: int) -> tuple[Chunk, ...]:
    """Each rank's heads in `num_chunks` runs that differ by at most one head.

    Raises ValueError when no rank has as many heads, or groups do not divide.
    """
    deals = deal_heads(num_heads, num_kv_heads, parts)
    most = max(d.q_stop - d.q_start for d in deals)
    if not 1 <= num_chunks <= most:
        raise ValueError(
            f"head_chunks={num_chunks} must be from 1 to the {most} query heads of a rank, got "
            f"num_heads={num_heads} over {parts} ranks. Lower head_chunks."
        )
    group = num_heads // num_kv_heads
    sent = [d.kv_start for d in deals]
    chunks = []
    for c in range(num_chunks):
        own, fresh = [], []
        for rank, d in enumerate(deals):
            total = d.q_stop - d.q_start
            start, stop = (d.q_start + total * i // num_chunks for i in (c, c + 1))
            kv_start = start // group
            kv_stop = -(-stop // group) if stop > start else kv_start
            own.append(Deal(start, stop, kv_start, kv_stop))
            fresh.append((sent[rank], max(sent[rank], kv_stop)))
            sent[rank] = fresh[-1][1]
        chunks.append(Chunk(tuple(own), tuple(fresh)))
    return tuple(chunks)


def comes(chunk: Chunk) -> bool:
    """Whether some rank gets kv heads with it: the same answer everywhere."""
    return any(stop > start for start, stop in chunk.fresh)


def batches(chunks: Sequence[Chunk], c: int, rank: int) -> list[tuple[int, Range]]:
    """Which chunks brought a rank's kv heads of chunk c, and which of theirs they are: in order."""
    deal, found = chunks[c].deals[rank], []
    for j in range(c + 1):
        start, stop = chunks[j].fresh[rank]
        a, b = max(start, deal.kv_start), min(stop, deal.kv_stop)
        if a < b:
            found.append((j, (a - start, b - start)))
    return found


def needed(chunks: Sequence[Chunk], c: int) -> list[int]:
    """Chunks whose kv heads some rank attends with in chunk c: the same answer everywhere."""
    ranks = range(len(chunks[c].deals))
    return sorted({j for rank in ranks for j, _ in batches(chunks, c, rank)})
