"""What the papers say a scheme sends, to stand beside what is counted: bytes of one rank and one layer, each
way, without what is run again and without chunks of heads. Letters: B batch, S sequence, D model, N query
heads, K kv heads, H head size, P ranks of the axes, W parameters.

Sums of gradients travel in float32 (`w` bytes an element), everything else in the type that computes (`i`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from usp.mesh.collectives import sum_dtype
from usp.mesh.spec import Axes, local_range
from usp.models.params import Block, abstract
from usp.models.plan.local import Local
from usp.models.plan.routes import routes

_ODYSSEUS = "github.com/feifeibear/Odysseus-Transformer"


class Formula(NamedTuple):
    """`covers`: the collectives that it speaks of, as `Traffic.what` names them."""

    scheme: str
    axes: Axes
    text: str
    forward: int
    backward: int
    source: str
    covers: tuple[str, ...]


def textbook(where: Local, dtype: torch.dtype) -> tuple[Formula, ...]:
    """The formulas of the schemes that the table combines, where heads, features and tokens divide evenly.

    Parameters that move in another way than a gather, from one cut to another, have no formula.
    """
    item, wide = dtype.itemsize, sum_dtype(dtype).itemsize
    return (
        *_ulysses(where, item),
        *_ring(where, item, wide),
        *_cut(where, item, wide),
        *_zero3(where, item, wide),
    )


def _kv_heads(where: Local) -> float:
    """Of one rank, which has one at least."""
    shared = where.ways * (1 if where.axis is None else where.sizes[where.axis])
    return max(where.cfg.num_kv_heads / shared, 1.0)


def _ulysses(where: Local, item: int) -> list[Formula]:
    """S is the block that the axis shares: what outer axes leave of the whole sequence."""
    if where.axis is None:
        return []
    parts, outer = where.sizes[where.axis], tuple(a for a in where.table.attn_x[1] if a != where.axis)
    tokens = where.rows * local_range(where.seq_len, outer, where.sizes, where.at)[1]
    heads = where.cfg.num_heads + _kv_heads(where) * parts
    nbytes = int(2 * tokens * heads * where.cfg.head_dim * (parts - 1) / parts**2) * item
    return [
        Formula(
            "Ulysses", (where.axis,), "each way 2 i B S (N + K) H (P-1) / P^2; K at least P", nbytes, nbytes,
            "arXiv 2309.14509, where K = N", ("q, k, v", "o", "gradients of q, k, v", "gradient of o"),
        )
    ]  # fmt: skip


def _ring(where: Local, item: int, wide: int) -> list[Formula]:
    """Gradients that go around come home after P hops; gathered keys have theirs scattered once."""
    if where.degree == 1:
        return []
    num = int(2 * where.rows * where.seq_len * _kv_heads(where) * where.cfg.head_dim)
    parts = where.degree
    there = num * (parts - 1) // parts
    home, text = (there, "(i + w) (P-1) / P") if where.gathers(1) else (num, "i (P-1) / P + w")
    return [
        Formula(
            "ring", (where.ring,), f"2 B S K H times i (P-1) / P, back {text}; K kv heads of a rank",
            there * item, there * item + home * wide, "arXiv 2310.01889",
            ("keys of the ring", "gradients of the ring's keys"),
        )
    ]  # fmt: skip


def _cut(where: Local, item: int, wide: int) -> list[Formula]:
    """Weights that stay cut in use: x is gathered along the sequence, what they make of it, a sum, scattered.

    Attention's alone: Odysseus. The MLP's too: tensor parallelism with the sequence cut between the halves.
    """
    table, sizes, found = where.table, where.sizes, []
    halves = (("wq", table.attn_x, "attention"), ("w_gate", table.mlp_x, "the MLP"))
    both = all(_cut_over(where, leaf) for leaf, *_ in halves)
    for leaf, x, what in halves:
        axes = _cut_over(where, leaf)
        if not axes or not set(axes) <= set(table.residual[1]):
            continue
        parts = math.prod(sizes[a] for a in axes)
        nbytes = where.tokens(x) * where.cfg.hidden_size * (parts - 1) // parts * (item + wide)
        name, source = ("tensor parallel", "arXiv 2205.05198") if both else ("Odysseus", _ODYSSEUS)
        text = "each way (i + w) B S D (P-1) / P: a gather and a reduce-scatter of x"
        covers = (f"x before {what}", f"x after {what}")
        found.append(Formula(name, axes, text, nbytes, nbytes, source, covers))
    return found


def _cut_over(where: Local, leaf: str) -> Axes:
    return tuple(a for a in where.table.use[leaf][0] if where.sizes[a] > 1)


def _zero3(where: Local, item: int, wide: int) -> list[Formula]:
    """One for each group of axes that leaves are gathered over: a rank sends its part to all the others."""
    found = []
    leaves = dict(zip(Block._fields, abstract(where.cfg).layers[0], strict=True))
    for axes, slots in routes(leaves, where).together.items():
        parts = math.prod(where.sizes[a] for a in axes)
        num = sum(math.prod(slot.full) for slot in slots) * (parts - 1) // parts
        found.append(
            Formula(
                "ZeRO-3", axes, "i W (P-1) / P, back w W (P-1) / P; W gathered over these axes",
                num * item, num * wide, "arXiv 1910.02054", ("layer",),
            )
        )  # fmt: skip
    return found
