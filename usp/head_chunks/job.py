"""One layer's chunks: what is made and exchanged for each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from usp.head_chunks.deal import Chunk, Range
from usp.heads import trade, trade_back, with_equal_groups
from usp.kernels import Kernel
from usp.mesh import MeshLike, coordinates
from usp.ring import Ring
from usp.spans import Mask


class Projections(NamedTuple):
    """How to make heads of an x placed as `table.attn_x`, with what else q, k and v go through.

    q(x, weights, ranges) -> [B, S, N', H] and kv(x, weights, ranges) -> k, v [B, S, K', H] of the given
    ranges of heads, one after the other. Neither may communicate.
    """

    q: Callable[[Tensor, Any, Sequence[Range]], Tensor]
    kv: Callable[[Tensor, Any, Sequence[Range]], tuple[Tensor, Tensor]]


@dataclass
class Job:
    """Everything about one layer's chunks but the tensors."""

    make: Projections
    tree: pytree.TreeSpec
    chunks: tuple[Chunk, ...]
    group: int
    mask: Mask
    place: Ring
    kernel: Kernel
    mesh: MeshLike
    axis: str | None
    own_seq: tuple[int, ...]

    @property
    def me(self) -> int:
        return 0 if self.axis is None else coordinates(self.mesh)[self.axis]

    def queries(self, c: int, x: Tensor, weights: Any) -> Tensor:
        ranges = [(d.q_start, d.q_stop) for d in self.chunks[c].deals]
        return self._traded([self.make.q(x, weights, ranges)], ranges)[0]

    def fresh_keys(self, c: int, x: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
        ranges = self.chunks[c].fresh
        k, v = self._traded(list(self.make.kv(x, weights, ranges)), ranges)
        return k, v

    def _traded(self, made: list[Tensor], ranges: Sequence[Range]) -> list[Tensor]:
        if self.axis is None:
            return made
        at, places = 0, []
        for start, stop in ranges:  # where each rank's heads are in what was made
            places.append((at, at + stop - start))
            at += stop - start
        return trade([(t, places) for t in made], self.mesh, self.axis, self.own_seq)

    def comes(self, c: int) -> bool:
        """Whether some rank gets kv heads with this chunk: the same answer everywhere."""
        return any(stop > start for start, stop in self.chunks[c].fresh)

    def batches(self, c: int, rank: int) -> list[tuple[int, Range]]:
        """Which chunks brought a rank's kv heads of chunk c, and which of theirs they are: in order."""
        deal, found = self.chunks[c].deals[rank], []
        for j in range(c + 1):
            start, stop = self.chunks[j].fresh[rank]
            a, b = max(start, deal.kv_start), min(stop, deal.kv_stop)
            if a < b:
                found.append((j, (a - start, b - start)))
        return found

    def needed(self, c: int) -> list[int]:
        """Chunks whose kv heads some rank attends with in chunk c: the same answer everywhere."""
        ranks = range(len(self.chunks[c].deals))
        return sorted({j for rank in ranks for j, _ in self.batches(c, rank)})

    def keys(self, c: int, held: dict[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """This rank's k and v for chunk c out of what came."""
        parts = [[t[:, :, slice(*r)] for t in held[j]] for j, r in self.batches(c, self.me)]
        if not parts:  # no heads in this chunk
            k, v = (t[:, :, :0] for t in held[max(held)])
            return k, v
        k, v = (ts[0] if len(ts) == 1 else torch.cat(ts, 2) for ts in map(list, zip(*parts, strict=True)))
        return with_equal_groups(k, v, self.chunks[c].deals[self.me], self.group)

    def back(self, c: int, o: Tensor) -> Tensor:
        """[B, S, own heads, H] -> [B, S@axis, heads of chunk c of all ranks, H]."""
        if self.axis is None:
            return o
        counts = tuple(d.q_stop - d.q_start for d in self.chunks[c].deals)
        return trade_back(o, self.mesh, self.axis, counts, self.own_seq)

    def there(self, c: int, o: Tensor) -> Tensor:
        """The transpose of `back`."""
        counts = [(d.q_start, d.q_stop) for d in self.chunks[c].deals]
        return self._traded([o], counts)[0]

    def slots(self, c: int) -> list[tuple[Range, Range]]:
        """Ranges of heads in chunk c's result, and where they belong among all heads."""
        at, found = 0, []
        for d in self.chunks[c].deals:
            size = d.q_stop - d.q_start
            found.append(((at, at + size), (d.q_start, d.q_stop)))
            at += size
        return found
