"""Attention weights that stay cut by head while they are used, for any number of heads.

Where query and kv heads divide by the ranks that share them, a weight's cut rows are those heads. Otherwise
the weight comes whole and each rank takes the rows of the heads that are dealt to it, so that no head is ever
split and kv heads follow the query heads that need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from torch import Tensor

from usp.deal import Deal, deal_heads
from usp.mesh import P, Table, axis_sizes, coordinates
from usp.models.config import LlamaConfig
from usp.models.params import Block, Mesh

BY_HEAD = ("wq", "wk", "wv", "wo", "bq", "bk", "bv")


def use_spec(cfg: LlamaConfig, table: Table, mesh: Mesh, name: str) -> P:
    """Where a weight is gathered to: `table.use`, or whole where heads do not divide."""
    spec = table.use[name]
    if name in BY_HEAD and not _divides(cfg, ways(table, axis_sizes(mesh))):
        return P(*(None for _ in spec.dims))
    return spec


def own_heads(w: Block, cfg: LlamaConfig, table: Table, mesh: Mesh) -> tuple[Block, Deal | None]:
    """The rows of this rank's heads where `use_spec` brought all of them, and which heads they are."""
    sizes = axis_sizes(mesh)
    num_ways = ways(table, sizes)
    if _divides(cfg, num_ways):
        return w, None
    index = place(table, sizes, coordinates(mesh))
    deal, size = deal_heads(cfg.num_heads, cfg.num_kv_heads, num_ways)[index], cfg.head_dim
    q = slice(deal.q_start * size, deal.q_stop * size)
    kv = slice(deal.kv_start * size, deal.kv_stop * size)

    def cut(bias: Tensor | None, rows: slice) -> Tensor | None:
        return None if bias is None else bias[rows]

    w = w._replace(wq=w.wq[q], wk=w.wk[kv], wv=w.wv[kv], wo=w.wo[:, q])
    return w._replace(bq=cut(w.bq, q), bk=cut(w.bk, kv), bv=cut(w.bv, kv)), deal


def ways(table: Table, sizes: Mapping[str, int]) -> int:
    """Ranks among which attention's weights stay cut by head."""
    return prod(sizes[axis] for axis in table.use["wq"][0])


def place(table: Table, sizes: Mapping[str, int], at: Mapping[str, int]) -> int:
    """Which of them is at coordinates `at`."""
    index = 0
    for axis in table.use["wq"][0]:
        index = index * sizes[axis] + at[axis]
    return index


def _divides(cfg: LlamaConfig, ways: int) -> bool:
    return cfg.num_heads % ways == 0 and cfg.num_kv_heads % ways == 0
