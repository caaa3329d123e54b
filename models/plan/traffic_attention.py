"""What attention itself sends: q, k, v and its result between ranks, keys and their gradients in a ring."""

from __future__ import annotations

from collections.abc import Callable

import torch

from usp.head_chunks import deal_chunks
from usp.models.attended import Heads, attended
from usp.models.plan.local import Local
from usp.models.plan.traffic_kinds import SHIFT, Traffic

Range = tuple[int, int]
Way = Callable[..., list[Traffic]]


def attention_forward(
    where: Local, dtype: torch.dtype, head_chunks: int, *, replayed: bool = False, bare: bool = False
) -> tuple[Traffic, ...]:
    """`replayed`: the attention itself is not run, see `usp.kept`; `bare`: nor is its gradient."""
    found: list[Traffic] = []
    for q, kv, heads in _chunks(where, head_chunks):
        chunked = head_chunks > 1
        if not (replayed and (chunked or bare)):  # chunks that are kept are not even projected
            found += _to_heads(where, dtype, q, kv, together=not chunked)
        if not replayed:
            found += _ring_forward(where, dtype, heads, head_chunks)
        found += _turned(where, dtype, "o", q, 1)
    return tuple(found)


def attention_backward(where: Local, dtype: torch.dtype, head_chunks: int) -> tuple[Traffic, ...]:
    """Gradients alone, and with chunks of heads what these project and send again."""
    found: list[Traffic] = []
    for q, kv, heads in reversed(_chunks(where, head_chunks)):
        found += _there(where, dtype, "gradient of o", q, 1)
        if head_chunks > 1:
            found += _to_heads(where, dtype, q, kv, together=False)
        found += _ring_backward(where, dtype, heads, head_chunks)
        if head_chunks > 1:
            found += _turned(where, dtype, "gradient of q", q, 1)
            found += _turned(where, dtype, "gradients of k, v", kv, 2) if _any(kv) else []
        else:
            found += _both(_turned, where, dtype, "gradients of q, k, v", q, kv)
    return tuple(found)


def _chunks(where: Local, head_chunks: int) -> list[tuple[list[Range], list[Range], Heads]]:
    """Per chunk the query and kv heads that each rank gets with it, and what this one attends with."""
    if head_chunks == 1:
        q = [(d.q_start, d.q_stop) for d in where.deals]
        return [(q, [(d.kv_start, d.kv_stop) for d in where.deals], where.heads)]
    parts = 1 if where.axis is None else where.sizes[where.axis]
    chunks = deal_chunks(where.cfg.num_heads, where.cfg.num_kv_heads, parts, head_chunks)
    me = 0 if where.axis is None else where.place
    return [
        ([(d.q_start, d.q_stop) for d in c.deals], list(c.fresh), attended(c.deals[me], where.group))
        for c in chunks
    ]


def _any(ranges: list[Range]) -> bool:
    return any(stop > start for start, stop in ranges)


def _own(where: Local) -> tuple[int, int]:
    """Tokens of this rank's block of the sequence that others of the trading axis hold, and its own."""
    assert where.axis is not None
    own = where.length(where.table.attn_x)
    return where.length(where.table.q) - own, own


def _there(where: Local, dtype: torch.dtype, what: str, ranges: list[Range], tensors: int) -> list[Traffic]:
    """From the sequence to the heads: 1 all-to-all."""
    if where.axis is None:
        return []
    _, own = _own(where)
    heads = sum(stop - start for i, (start, stop) in enumerate(ranges) if i != where.place)
    nbytes = where.rows * own * heads * tensors * where.cfg.head_dim * dtype.itemsize
    return [Traffic(what, "all_to_all", (where.axis,), 1, nbytes)]


def _turned(where: Local, dtype: torch.dtype, what: str, ranges: list[Range], tensors: int) -> list[Traffic]:
    """From the heads to the sequence: 1 all-to-all."""
    if where.axis is None:
        return []
    others, _ = _own(where)
    start, stop = ranges[where.place]
    nbytes = where.rows * others * (stop - start) * tensors * where.cfg.head_dim * dtype.itemsize
    return [Traffic(what, "all_to_all", (where.axis,), 1, nbytes)]


def _both(
    way: Callable[..., list[Traffic]],
    where: Local,
    dtype: torch.dtype,
    what: str,
    q: list[Range],
    kv: list[Range],
) -> list[Traffic]:
    """q, k and v in one all-to-all."""
    parts = [*way(where, dtype, what, q, 1), *way(where, dtype, what, kv, 2)]
    return [parts[0]._replace(nbytes=sum(t.nbytes for t in parts))] if parts else []


def _to_heads(
    where: Local, dtype: torch.dtype, q: list[Range], kv: list[Range], *, together: bool
) -> list[Traffic]:
    if together:
        return _both(_there, where, dtype, "q, k, v", q, kv)
    return _there(where, dtype, "q", q, 1) + (_there(where, dtype, "k, v", kv, 2) if _any(kv) else [])


def kv_elements(where: Local, heads: Heads) -> int:
    """k and v together, as a ring passes them on."""
    return where.tokens(where.table.q) * heads.kv * 2 * where.cfg.head_dim


def ring_elements(where: Local, head_chunks: int) -> int:
    """k and v of all chunks, one after the other: those that several chunks attend with count in each."""
    return sum(kv_elements(where, heads) for *_, heads in _chunks(where, head_chunks) if heads.q)


def _ring_forward(where: Local, dtype: torch.dtype, heads: Heads, head_chunks: int) -> list[Traffic]:
    hops, nbytes = where.degree - 1, kv_elements(where, heads) * dtype.itemsize
    if not hops or not heads.q:
        return []
    if where.gathers(head_chunks):
        return [Traffic("keys of the ring", "all_gather", (where.ring,), 1, hops * nbytes)]
    return [Traffic("keys of the ring", SHIFT, (where.ring,), hops, hops * nbytes)]


def _ring_backward(where: Local, dtype: torch.dtype, heads: Heads, head_chunks: int) -> list[Traffic]:
    found = _ring_forward(where, dtype, heads, head_chunks)
    if not found:
        return []
    wide = torch.promote_types(dtype, torch.float32).itemsize
    nbytes, axes, what = kv_elements(where, heads) * wide, (where.ring,), "gradients of the ring's keys"
    if where.gathers(head_chunks):
        return [*found, Traffic(what, "reduce_scatter", axes, 1, (where.degree - 1) * nbytes)]
    return [*found, Traffic(what, SHIFT, axes, where.degree, where.degree * nbytes)]
