"""Which local query rows attend to which local key rows: one attention layer as a list of kernel runs.

Everything is arithmetic on document boundaries in global positions; nothing here has a tensor, and no mask of
S x S is ever made. A ring rank holds pieces of each row (`usp.order.pieces`); a query piece and a key piece
meet in one rectangle of scores for each document that both hold a part of, cut to what the causal rule and
the window let through.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from usp.kernels.interface import PACKED, SOFTCAP, WINDOW, Segments
from usp.mesh.constants import constant
from usp.order import pieces


class Mask(NamedTuple):
    """What may attend to what in `num_rows` rows of `seq_len` tokens, in natural positions.

    edges: document boundaries over the rows laid end to end. window: a query sees keys less than `window`
    positions away, itself included; None: all. ring: ranks that share the sequence.
    """

    edges: tuple[int, ...]
    num_rows: int
    seq_len: int
    causal: bool
    window: int | None
    scale: float
    softcap: float
    ring: int = 1

    def repeated(self, size: int) -> Mask:
        """The mask of `size` copies of the batch laid end to end."""
        total = self.edges[-1]
        edges = (0, *(i * total + edge for i in range(size) for edge in self.edges[1:]))
        return self._replace(edges=edges, num_rows=size * self.num_rows)


class Run(NamedTuple):
    """One call of a kernel: rows [start, stop) of the flattened local queries and keys, and its segments."""

    q: tuple[int, int]
    k: tuple[int, int]
    segments: Segments


class _Cell(NamedTuple):
    """One rectangle: local rows of queries and keys, and its band (see `Segments`)."""

    q: tuple[int, int]
    k: tuple[int, int]
    left: int | None
    right: int | None

    @property
    def free(self) -> bool:
        return self.left is None and self.right is None


def runs(mask: Mask, rank: int, source: int) -> tuple[Run, ...]:
    """What ring rank `rank` computes with the keys of ring rank `source`.

    Of a rank's own keys the first run covers every query row once. Query rows that see nothing of `source`
    are in no run. Worked out once for all layers; inside torch.compile a constant of the program.
    """
    found: tuple[Run, ...] = _constant_runs(tuple(mask), rank, source)
    return found


@constant
def _constant_runs(mask: tuple[Any, ...], rank: int, source: int) -> tuple[Run, ...]:
    return _runs(Mask(*mask), rank, source)


@lru_cache(maxsize=256)  # those of packed rows are large, and used in one step
def _runs(mask: Mask, rank: int, source: int) -> tuple[Run, ...]:
    mine = pieces(mask.seq_len, mask.ring, rank)
    theirs = pieces(mask.seq_len, mask.ring, source)
    held = sum(length for _, length in mine)
    diagonal: list[_Cell] = []
    others: list[_Cell] = []
    for row in range(mask.num_rows):
        edges = _row_edges(mask, row)
        cells: list[_Cell] = []
        for i, q_piece in enumerate(mine):
            for j, k_piece in enumerate(theirs):
                q_at, k_at = row * held + i * q_piece[1], row * held + j * k_piece[1]
                if q_piece == k_piece:
                    diagonal += _own(mask, edges, q_piece, q_at)
                else:
                    cells += _across(mask, edges, q_piece, k_piece, q_at, k_at)
        others += _joined(cells)
    return (*_as_runs(mask, diagonal), *(run for cell in others for run in _as_runs(mask, [cell])))


def features(mask: Mask) -> frozenset[str]:
    """What a kernel must be able to do for every run of every rank: the same answer on all of them."""
    lengths = {b - a for a, b in pairwise(mask.edges)}
    packed = len(lengths) > 1 or (mask.ring > 1 and len(mask.edges) != mask.num_rows + 1)
    wanted = {PACKED: packed, WINDOW: mask.window is not None, SOFTCAP: bool(mask.softcap)}
    return frozenset(name for name, needed in wanted.items() if needed)


def _row_edges(mask: Mask, row: int) -> list[int]:
    """Boundaries of one row, from 0 to seq_len."""
    start = row * mask.seq_len
    first = bisect_right(mask.edges, start) - 1
    last = bisect_right(mask.edges, start + mask.seq_len)
    return [edge - start for edge in mask.edges[first:last]]


def _own(mask: Mask, edges: list[int], piece: tuple[int, int], at: int) -> list[_Cell]:
    """A piece with itself: one cell a document."""
    start, length = piece
    reach = None if mask.window is None else mask.window - 1
    cuts = [start, *(e for e in edges if start < e < start + length), start + length]
    ranges = [(at + a - start, at + b - start) for a, b in pairwise(cuts)]
    return [_Cell(rows, rows, reach, 0 if mask.causal else reach) for rows in ranges]


def _across(
    mask: Mask, edges: list[int], q_piece: tuple[int, int], k_piece: tuple[int, int], q_at: int, k_at: int
) -> list[_Cell]:
    """Two different pieces: at most one document reaches from one into the other."""
    (q0, num_q), (k0, num_k) = q_piece, k_piece
    if mask.causal and k0 > q0:
        return []
    early, late = min(q0 + num_q, k0 + num_k), max(q0, k0)  # end of the earlier piece, start of the later
    which = bisect_right(edges, late) - 1
    if late >= edges[-1] or edges[which] >= early:
        return []
    low, high = edges[which], edges[which + 1]
    qa, qb, ka, kb = max(q0, low), min(q0 + num_q, high), max(k0, low), min(k0 + num_k, high)
    left = right = None
    if mask.window is not None:
        reach = mask.window - 1
        for _ in range(2):  # the second time with the ends that the first left
            ka, kb = max(ka, qa - reach), min(kb, qb + reach)
            qa, qb = max(qa, ka - reach), min(qb, kb + reach)
            if qa >= qb or ka >= kb:
                return []
        left, right = kb - qb + reach, qb - kb + reach
        left = None if left >= kb - ka - 1 else left
        right = None if mask.causal or right >= qb - qa - 1 else right
    return [_Cell((q_at + qa - q0, q_at + qb - q0), (k_at + ka - k0, k_at + kb - k0), left, right)]


def _joined(cells: list[_Cell]) -> list[_Cell]:
    """Neighbours without a band that make one rectangle, joined: first along the keys, then the queries."""
    rows: list[_Cell] = []
    for cell in sorted(cells, key=lambda c: (c.q, c.k)):
        last = rows[-1] if rows else cell
        if last.q == cell.q and last.k[1] == cell.k[0] and last.free and cell.free:
            rows[-1] = last._replace(k=(last.k[0], cell.k[1]))
        else:
            rows.append(cell)
    joined: list[_Cell] = []
    for cell in rows:
        last = joined[-1] if joined else cell
        if last.k == cell.k and last.q[1] == cell.q[0] and last.free and cell.free:
            joined[-1] = last._replace(q=(last.q[0], cell.q[1]))
        else:
            joined.append(cell)
    return joined


def _as_runs(mask: Mask, cells: list[_Cell]) -> list[Run]:
    """One run for cells that lie end to end, which all have the same band."""
    if not cells:
        return []
    segments = Segments(
        cu_q=(0, *(c.q[1] - cells[0].q[0] for c in cells)),
        cu_k=(0, *(c.k[1] - cells[0].k[0] for c in cells)),
        left=cells[0].left,
        right=cells[0].right,
        scale=mask.scale,
        softcap=mask.softcap,
    )
    return [Run((cells[0].q[0], cells[-1].q[1]), (cells[0].k[0], cells[-1].k[1]), segments)]
