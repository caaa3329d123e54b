"""Trading the sequence shard for a head shard: Ulysses, with any number of heads on any ranks.

Query heads are dealt in contiguous runs that differ by at most one head; every rank also receives the kv
heads its query heads attend with, so a kv head needed by several ranks is replicated and its gradient summed.
With more ranks than query heads the last ranks hold none, and still take part in every exchange.
The way back is `usp.heads_back`. Source of the scheme: Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from usp.columns import columns
from usp.deal import deal_heads, with_equal_groups
from usp.mesh import MeshLike, P, Table, axis_sizes, coordinates, exchange
from usp.mesh.exchange import Unawaited
from usp.mesh.spec import chunk_lengths, local_range
from usp.wire import can_wire, to_wire


def seq_to_heads(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: MeshLike, table: Table, seq_len: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Move q, k, v from where they are projected to where attention runs, together.

    q [B, S, N, H], k [B, S, K, H] and v [B, S, K, Hv], S and heads as `table.attn_x` and the projection leave
    them; results as `table.q` and `table.kv`. k and v come back with K' heads so that query head i attends
    with kv head i // (N_local / K'). `seq_len` is the global S. Communicates 1 all-to-all each way over the
    axis that moves from the sequence to the heads; nothing when none does. Gradients of replicated kv heads
    are summed in at least float32. Raises ValueError when the table asks for another move or shapes do not
    fit.
    """
    axis = trading_axis(table, mesh)
    if axis is None:
        return q, k, v
    if k.shape[:3] != v.shape[:3] or (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]):
        raise ValueError(
            f"k={tuple(k.shape)}, v={tuple(v.shape)} must be [B, S, K, H], got q={tuple(q.shape)} as "
            f"[B, S, N, H]. Pass all three with the same B and S, k with the H of q."
        )
    num_heads, num_kv = q.shape[2], k.shape[2]
    deals = deal_heads(num_heads, num_kv, axis_sizes(mesh)[axis])
    q_ranges = [(d.q_start, d.q_stop) for d in deals]
    kv_ranges = [(d.kv_start, d.kv_stop) for d in deals]
    dealt = ((q, q_ranges), (k, kv_ranges), (v, kv_ranges))
    q, k, v = trade(dealt, mesh, axis, seq_lengths(table, mesh, axis, seq_len))
    return q, *with_equal_groups(k, v, deals[coordinates(mesh)[axis]], num_heads // num_kv)


Dealt = tuple[Tensor, Sequence[tuple[int, int]]]
"""A tensor [B, S@axis, N, H] and the range of its heads that each rank of the axis is to have."""


def trade(dealt: Sequence[Dealt], mesh: MeshLike, axis: str, own_seq: tuple[int, ...]) -> list[Tensor]:
    """Each tensor's own range of heads over the whole sequence, all together: 1 all-to-all.

    `own_seq`: tokens that each rank of `axis` holds. Tensors may have head sizes of their own. Where ranges
    overlap the heads are replicated, and their gradients summed in at least float32. One copy packs (the
    results are views of what arrives, their rows apart; for B = 1 they need no copy to be read flat).
    """
    me, rows = coordinates(mesh)[axis], dealt[0][0].shape[0]
    # to each rank [S@axis, B, its heads of all tensors], so that what arrives is [S, B, own heads]
    flat = wire([x for x, _ in dealt], len(own_seq)) if _in_order(dealt) else _cut_wire(dealt)
    heads = [[(r[rank][1] - r[rank][0], x.shape[3]) for x, r in dealt] for rank in range(len(own_seq))]
    return _send_wire(flat, heads, mesh, axis, rows, own_seq, me)


def _send_wire(
    flat: Tensor,
    heads: Sequence[Sequence[tuple[int, int]]],
    mesh: MeshLike,
    axis: str,
    rows: int,
    own_seq: tuple[int, ...],
    me: int,
    apart: Unawaited | None = None,
) -> list[Tensor]:
    """What `wire` made, for `heads` (number, size) of each tensor on each rank: sent, and seen as tensors."""
    widths = [sum(n * size for n, size in each) for each in heads]
    came = exchange(
        flat.reshape(-1), mesh, axis,
        send=tuple(own_seq[me] * rows * width for width in widths),
        receive=tuple(n * rows * widths[me] for n in own_seq),
        apart=apart,
    )  # fmt: skip
    return _unwired(came, heads[me], rows, sum(own_seq))


def wired_to_heads(
    wired: Tensor,
    heads: Sequence[tuple[int, int]],
    *,
    mesh: MeshLike,
    table: Table,
    seq_len: int,
    apart: Unawaited | None = None,
) -> list[Tensor]:
    """As `seq_to_heads`, from a [ranks, S@axis, B, heads * H] that `wire` made: no copy at all.

    `heads`: (number, size) of each tensor's heads on one rank, the same on all. `apart`: the results are not
    to be read before `apart.wait()`.
    """
    axis = trading_axis(table, mesh)
    assert axis is not None
    each = [list(heads)] * axis_sizes(mesh)[axis]
    own_seq = seq_lengths(table, mesh, axis, seq_len)
    return _send_wire(wired, each, mesh, axis, wired.shape[2], own_seq, coordinates(mesh)[axis], apart)


def wire(tensors: Sequence[Tensor], parts: int) -> Tensor:
    """[ranks, S@axis, B, heads * H] of tensors whose heads divide by the ranks: one copy, or, compiled with
    what makes the tensors, none."""
    if can_wire(tensors[0]):
        return to_wire(tensors, parts)
    return torch.cat([_by_rank(x, parts).permute(2, 1, 0, 3) for x in tensors], 3)


def _by_rank(x: Tensor, parts: int) -> Tensor:
    """[B, S, N, H] -> [B, S, parts, N / parts * H]."""
    return x.reshape(*x.shape[:2], parts, x.shape[2] // parts * x.shape[3])


def _unwired(came: Tensor, heads: Sequence[tuple[int, int]], rows: int, length: int) -> list[Tensor]:
    """[S, B, heads * H of all tensors], flat -> views [B, S, heads, H], for (heads, H) of each."""
    joined = came.view(length * rows, sum(n * size for n, size in heads))
    return [t.view(length, rows, *t.shape[1:]).transpose(0, 1) for t in columns(joined, heads)]


def _in_order(dealt: Sequence[Dealt]) -> bool:
    """Whether every rank gets equally many heads of each tensor, one rank's after the other's."""
    for x, ranges in dealt:
        size = x.shape[2] // len(ranges)
        if size * len(ranges) != x.shape[2]:
            return False
        if any(r != (i * size, (i + 1) * size) for i, r in enumerate(ranges)):
            return False
    return True


def _cut_wire(dealt: Sequence[Dealt]) -> Tensor:
    """As `wire`, flat, for any ranges."""
    dtype = dealt[0][0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    sources = [
        (x.to(wide) if any(a[1] > b[0] for a, b in pairwise(ranges)) else x, ranges) for x, ranges in dealt
    ]
    blocks = []
    for rank in range(len(dealt[0][1])):
        heads = [x[:, :, slice(*ranges[rank])].to(dtype).transpose(0, 1).flatten(2) for x, ranges in sources]
        block = torch.cat(heads, 2)
        blocks.append(block.reshape(1, block.numel()))
    # of 2 dimensions: vmap loses its own in a join of flat tensors without entries
    return torch.cat(blocks, 1)


def trading_axis(table: Table, mesh: MeshLike) -> str | None:
    """The axis that leaves the sequence for the heads, or None; axes of size 1 do not count."""
    sizes = axis_sizes(mesh)

    def real(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(a for a in axes if sizes[a] > 1)

    made = P(*table.attn_x.dims[:2], table.use["wq"][0], None)
    if real(made[1]) == real(table.q[1]) and real(made[2]) == real(table.q[2]):
        return None
    axis = real(made[1])[-1:]
    if real(made[1])[:-1] != real(table.q[1]) or real(table.q[2]) != real(made[2]) + axis or real(made[2]):
        raise ValueError(
            f"q={table.q} must differ from where q is projected, {made}, by one axis that moves from the "
            f"sequence to the heads. Change table {table.name!r}."
        )
    return axis[0]


def seq_lengths(table: Table, mesh: MeshLike, axis: str, seq_len: int) -> tuple[int, ...]:
    """Tokens that each rank of `axis` holds of this rank's block of the sequence."""
    sizes = axis_sizes(mesh)
    outer = tuple(a for a in table.attn_x[1] if a != axis)
    block = local_range(seq_len, outer, sizes, coordinates(mesh))[1]
    return tuple(chunk_lengths(block, sizes[axis]))
