"""What one rank holds and does in a layer, in numbers alone: no tensors, no processes.

Dimension letters: B batch, S sequence, N query heads, K kv heads, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from usp.deal import Deal, deal_heads
from usp.heads import trading_axis
from usp.mesh import P, Table
from usp.mesh.spec import local_range
from usp.models.attended import Heads, attended, ring_heads
from usp.models.config import LlamaConfig
from usp.models.own_heads import place, ways
from usp.order import ring_axes, ring_degree, unit
from usp.ring import gather_pays


def padded_length(table: Table, sizes: Mapping[str, int], seq_len: int) -> int:
    """Tokens of a row after `shard_batch` has padded it."""
    parts = math.lcm(math.prod(sizes[a] for a in table.tokens[1]), unit(ring_degree(table, sizes)))
    return -(-seq_len // parts) * parts


@dataclass(frozen=True, kw_only=True)
class Local:
    """The rank at coordinates `at` of a mesh of `sizes`, working on `batch` rows of `seq_len` tokens."""

    cfg: LlamaConfig
    table: Table
    sizes: Mapping[str, int]
    batch: int
    seq_len: int
    """Global, padded."""
    at: Mapping[str, int]

    @cached_property
    def rows(self) -> int:
        return local_range(self.batch, self.table.tokens[0], self.sizes, self.at)[1]

    def length(self, spec: P) -> int:
        """Tokens of one row that this rank holds."""
        return local_range(self.seq_len, spec[1], self.sizes, self.at)[1]

    def tokens(self, spec: P) -> int:
        return self.rows * self.length(spec)

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.cfg.num_heads // self.cfg.num_kv_heads

    @cached_property
    def axis(self) -> str | None:
        """The axis that attention trades for heads."""
        return trading_axis(self.table, self.sizes)

    @property
    def ways(self) -> int:
        """Ranks among which attention's weights stay cut by head."""
        return ways(self.table, self.sizes)

    @property
    def degree(self) -> int:
        """Ranks of the ring."""
        return ring_degree(self.table, self.sizes)

    @property
    def ring(self) -> str:
        return next(iter(ring_axes(self.table, self.sizes)), "")

    @cached_property
    def deals(self) -> tuple[Deal, ...]:
        """Heads of every rank of `axis`, or of those that share attention's weights; one deal for none."""
        parts = self.sizes[self.axis] if self.axis is not None else self.ways
        return deal_heads(self.cfg.num_heads, self.cfg.num_kv_heads, parts)

    @cached_property
    def place(self) -> int:
        """This rank's place among `deals`."""
        if self.axis is not None:
            return self.at[self.axis]
        return place(self.table, self.sizes, self.at)

    @cached_property
    def heads(self) -> Heads:
        """Those that this rank attends with."""
        if self.axis is None and self.cfg.num_kv_heads % self.ways == 0:
            return Heads(self.cfg.num_heads // self.ways, self.cfg.num_kv_heads // self.ways)
        return attended(self.deals[self.place], self.group)

    def ring_heads(self, head_chunks: int) -> Heads:
        """Those by which a ring decides how keys travel: this rank's, or with chunks one for all."""
        if head_chunks == 1:
            return self.heads
        parts = 1 if self.axis is None else self.sizes[self.axis]
        return ring_heads(self.cfg.num_heads, self.cfg.num_kv_heads, parts, head_chunks)

    def gathers(self, head_chunks: int) -> bool:
        """Whether a ring fetches all keys at once."""
        heads = self.ring_heads(head_chunks)
        return self.degree > 1 and gather_pays(heads.q, heads.kv, self.degree)


def local(
    cfg: LlamaConfig,
    table: Table,
    sizes: Mapping[str, int],
    *,
    batch: int,
    seq_len: int,
    at: Mapping[str, int] | None = None,
) -> Local:
    """`at`: coordinates of the rank, without it the first; ranks differ where heads are dealt unevenly.

    `seq_len`: global, before padding.
    """
    return Local(
        cfg=cfg,
        table=table,
        sizes=dict(sizes),
        batch=batch,
        seq_len=padded_length(table, sizes, seq_len),
        at=dict.fromkeys(sizes, 0) if at is None else at,
    )
