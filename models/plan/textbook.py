"""What the papers say a scheme sends, to stand beside what is counted: elements of one rank, one layer,
forward. Letters: B batch, S sequence, D model, N query heads, K kv heads, H head size, P ranks of the axis.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from usp.mesh.spec import local_range
from usp.models.params import Block, abstract
from usp.models.plan.local import Local
from usp.models.plan.routes import room


class Formula(NamedTuple):
    scheme: str
    axes: tuple[str, ...]
    text: str
    nbytes: int
    source: str


def textbook(where: Local, dtype: torch.dtype) -> tuple[Formula, ...]:
    """The formulas of the schemes that the table combines, for equal heads and a sequence cut evenly.

    S is the block that the axis shares: what outer axes leave of the whole sequence.
    """
    cfg, item, sizes = where.cfg, dtype.itemsize, where.sizes
    found = []
    if where.axis is not None:
        parts, outer = sizes[where.axis], tuple(a for a in where.table.attn_x[1] if a != where.axis)
        block = where.rows * local_range(where.seq_len, outer, sizes, where.at)[1]
        num = 4 * block * cfg.num_heads * cfg.head_dim * (parts - 1) // parts**2
        found.append(
            Formula("Ulysses", (where.axis,), "4 B S N H (P-1) / P^2, as many kv heads as query heads",
                    num * item, "arXiv 2309.14509")
        )  # fmt: skip
    if where.degree > 1:
        parts = where.degree
        shared = where.ways * (1 if where.axis is None else sizes[where.axis])
        kv = max(cfg.num_kv_heads / shared, 1.0)
        num = int(2 * where.rows * where.seq_len * kv * cfg.head_dim * (parts - 1) / parts)
        found.append(
            Formula("ring", (where.ring,), "2 B S K H (P-1) / P, K kv heads of a rank", num * item,
                    "arXiv 2310.01889")
        )  # fmt: skip
    if where.ways > 1:
        axes = tuple(a for a in where.table.use["wq"][0] if sizes[a] > 1)
        parts = where.ways
        num = 2 * where.tokens(where.table.attn_x) * cfg.hidden_size * (parts - 1) // parts
        found.append(
            Formula("Odysseus", axes, "2 B S D (P-1) / P: gather and reduce-scatter of x", num * item,
                    "github.com/feifeibear/Odysseus-Transformer")
        )  # fmt: skip
    leaves = dict(zip(Block._fields, abstract(cfg).layers[0], strict=True))
    taken = room(leaves, where)
    if taken.received:
        axes = tuple(a for a, size in sizes.items() if size > 1)
        parts = math.prod(sizes[a] for a in axes)
        num = taken.use * (parts - 1) // parts
        # a rank sends its part to all others, or in a ring passes on what it gets: the same bytes
        found.append(
            Formula("ZeRO-3", axes, "W (P-1) / P, W parameters of a layer", num * item, "arXiv 1910.02054")
        )
    return tuple(found)
