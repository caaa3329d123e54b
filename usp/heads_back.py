"""Trading the head shard for the sequence shard again: attention's result where `usp.heads` found q."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from usp.deal import deal_heads
from usp.heads import seq_lengths, trading_axis
from usp.mesh import MeshLike, Table, axis_sizes, coordinates, exchange
from usp.mesh.exchange import Begun
from usp.wire import can_wire, from_wire


def heads_to_seq(o: Tensor, *, num_heads: int, mesh: MeshLike, table: Table, seq_len: int) -> Tensor:
    """Move attention's output o [B, S, N, H] from `table.q` back to where `seq_to_heads` found q.

    `num_heads` is the N that `seq_to_heads` was given, `seq_len` the global S. 1 all-to-all each way, or
    nothing. Raises ValueError for another number of heads or tokens than this rank has.
    """
    axis = trading_axis(table, mesh)
    if axis is None:
        return o
    counts, lengths = _back_to(o, num_heads, seq_len, table, mesh, axis)
    rows, own, size = o.shape[0], lengths[coordinates(mesh)[axis]], o.shape[3]
    came = _sent_back(o, mesh, axis, counts, lengths)
    if len(set(counts)) == 1:
        return _unwired_back(came, len(counts), own, o).view(rows, own, num_heads, size)
    blocks = torch.split(came, [own * rows * n * size for n in counts])
    heads = [b.view(own, rows, n, size) for b, n in zip(blocks, counts, strict=True)]
    return torch.cat(heads, 2).transpose(0, 1)


def heads_to_ranks(
    o: Tensor, *, num_heads: int, mesh: MeshLike, table: Table, seq_len: int, begun: Begun | None = None
) -> Tensor:
    """As `heads_to_seq` where the ranks have equally many heads: [B, S, ranks, a rank's heads * H].

    One copy unpacks. A gradient that lies as [ranks, S, B, heads * H] in memory needs none on its way back.
    `begun`: o is on its way, see `begin_to_ranks`.
    """
    axis = trading_axis(table, mesh)
    assert axis is not None
    counts, lengths = _back_to(o, num_heads, seq_len, table, mesh, axis)
    came = _sent_back(o, mesh, axis, counts, lengths, begun)
    return _unwired_back(came, len(counts), lengths[coordinates(mesh)[axis]], o)


def begin_to_ranks(o: Tensor, *, num_heads: int, mesh: MeshLike, table: Table, seq_len: int) -> Begun:
    """Send an o that is known before its history is, to be handed to `heads_to_ranks` with that."""
    axis = trading_axis(table, mesh)
    assert axis is not None
    counts, lengths = _back_to(o, num_heads, seq_len, table, mesh, axis)
    flat, sizes = _to_send_back(o, coordinates(mesh)[axis], counts, lengths)
    return Begun(flat, mesh, axis, **sizes)


def _back_to(
    o: Tensor, num_heads: int, seq_len: int, table: Table, mesh: MeshLike, axis: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(heads, tokens) of each rank of the axis. ValueError for an o that is not this rank's."""
    deals = deal_heads(num_heads, num_heads, axis_sizes(mesh)[axis])
    counts, lengths = tuple(d.q_stop - d.q_start for d in deals), seq_lengths(table, mesh, axis, seq_len)
    own = counts[coordinates(mesh)[axis]]
    if tuple(o.shape[1:3]) != (sum(lengths), own):
        raise ValueError(
            f"o={tuple(o.shape)} must hold {sum(lengths)} tokens and {own} heads on this rank, got "
            f"seq_len={seq_len}, num_heads={num_heads}. Pass what attention made of seq_to_heads' q."
        )
    return counts, lengths


def _sent_back(
    o: Tensor,
    mesh: MeshLike,
    axis: str,
    num_heads: tuple[int, ...],
    own_seq: tuple[int, ...],
    begun: Begun | None = None,
) -> Tensor:
    """[S, B, own heads, H] to each rank its tokens; from each rank [S@axis, B, its heads, H]: flat."""
    flat, sizes = _to_send_back(o, coordinates(mesh)[axis], num_heads, own_seq)
    return exchange(flat, mesh, axis, **sizes, apart=begun)


class _Sizes(TypedDict):
    send: tuple[int, ...]
    receive: tuple[int, ...]


def _to_send_back(
    o: Tensor, me: int, num_heads: tuple[int, ...], own_seq: tuple[int, ...]
) -> tuple[Tensor, _Sizes]:
    rows, _, own, size = o.shape
    sizes: _Sizes = {
        "send": tuple(n * rows * own * size for n in own_seq),
        "receive": tuple(own_seq[me] * rows * n * size for n in num_heads),
    }
    return o.transpose(0, 1).reshape(-1), sizes


def _unwired_back(came: Tensor, ranks: int, length: int, o: Tensor) -> Tensor:
    """What came for an o [B, S, heads, H] on each rank -> [B, S@axis, ranks, heads * H]: one copy."""
    wired = came.view(ranks, length, o.shape[0], o.shape[2] * o.shape[3])
    if can_wire(wired):
        return from_wire(wired, ((ranks, wired.shape[3]),))[0]
    return wired.permute(2, 1, 0, 3).contiguous()
