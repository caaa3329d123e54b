"""One layer's chunks: what is exchanged for each of them, and which of it a rank attends with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from usp.deal import with_equal_groups
from usp.head_chunks.deal import Chunk, Range, batches, comes, needed
from usp.head_chunks.project import Projections
from usp.head_chunks.swap import Swap
from usp.kernels import Kernel
from usp.ring import Ring
from usp.spans import Mask


@dataclass
class Job:
    """Everything about one layer's chunks but the tensors. `group`: of processes, None where none trade;
    `share`: query heads that share one kv head; `size`, `v_size`: of a head of q and k, and of v."""

    make: Projections
    tree: pytree.TreeSpec
    chunks: tuple[Chunk, ...]
    share: int
    size: int
    v_size: int
    mask: Mask
    place: Ring
    kernel: Kernel
    group: str | None
    me: int
    rows: int
    own_seq: tuple[int, ...]

    def q_ranges(self, c: int) -> list[Range]:
        return [(d.q_start, d.q_stop) for d in self.chunks[c].deals]

    def q_swap(self, c: int) -> Swap:
        return self._swap(self.q_ranges(c), self.size)

    def kv_swap(self, c: int) -> Swap:
        """Of the kv heads that come with chunk c."""
        return self._swap(list(self.chunks[c].fresh), self.size, self.v_size)

    def o_swap(self, c: int) -> Swap:
        return self._swap(self.q_ranges(c), self.v_size)

    def _swap(self, ranges: list[Range], *sizes: int) -> Swap:
        counts = tuple(stop - start for start, stop in ranges)
        return Swap(self.group, self.me, self.rows, self.own_seq, counts, sizes)

    def comes(self, c: int) -> bool:
        return comes(self.chunks[c])

    def batches(self, c: int) -> list[tuple[int, Range]]:
        return batches(self.chunks, c, self.me)

    def needed(self, c: int) -> list[int]:
        return needed(self.chunks, c)

    def keys(self, c: int, held: dict[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """This rank's k and v for chunk c out of what came."""
        parts = [[t[:, :, slice(*r)] for t in held[j]] for j, r in self.batches(c)]
        if not parts:  # no heads in this chunk
            k, v = (t[:, :, :0] for t in held[max(held)])
            return k, v
        k, v = (ts[0] if len(ts) == 1 else torch.cat(ts, 2) for ts in map(list, zip(*parts, strict=True)))
        return with_equal_groups(k, v, self.chunks[c].deals[self.me], self.share)
