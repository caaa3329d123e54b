"""The order in which a sequence is dealt to a ring, so that causal attention costs every rank the same.

The sequence is cut into 2R chunks; ring rank r holds chunk r and chunk 2R - 1 - r, one early and one late
("zigzag"; the pairing is that of Llama 3's context parallelism, arXiv 2407.21783, section 3.3.2). The whole
sequence is put in that order once, before any axis cuts it: block r of it then is what ring rank r holds, and
an inner axis cuts that block further. With R = 1 the order is the natural one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from usp.mesh import MeshLike, Table, axis_sizes

Piece = tuple[int, int]  # start and length, in natural positions


def ring_axes(table: Table, mesh: MeshLike) -> tuple[str, ...]:
    """Axes larger than 1 that still shard the sequence where attention runs, outermost first."""
    sizes = axis_sizes(mesh)
    return tuple(a for a in table.q[1] if sizes[a] > 1)


def ring_degree(table: Table, mesh: MeshLike) -> int:
    sizes = axis_sizes(mesh)
    return math.prod(sizes[a] for a in ring_axes(table, mesh))


def pieces(seq_len: int, degree: int, index: int) -> tuple[Piece, ...]:
    """What ring rank `index` of `degree` holds of a sequence, in the order in which it holds it."""
    if degree == 1:
        return ((0, seq_len),)
    step = seq_len // (2 * degree)
    return (index * step, step), ((2 * degree - 1 - index) * step, step)


def unit(degree: int) -> int:
    """The sequence must be a multiple of this."""
    return 1 if degree == 1 else 2 * degree


def zigzag(x: Tensor, degree: int, *, dim: int) -> Tensor:
    """Natural order -> ring order along `dim`, whose size is a multiple of 2 * degree."""
    return _reorder(x, [p for i in range(degree) for p in pieces(x.shape[dim], degree, i)], dim)


def unzigzag(x: Tensor, degree: int, *, dim: int) -> Tensor:
    """Ring order -> natural order: the inverse of `zigzag`."""
    held = [p for i in range(degree) for p in pieces(x.shape[dim], degree, i)]
    places, at = {}, 0
    for start, length in held:
        places[start] = (at, length)
        at += length
    return _reorder(x, [places[start] for start in sorted(places)], dim)


def _reorder(x: Tensor, parts: list[Piece], dim: int) -> Tensor:
    if len(parts) <= 1 or x.shape[dim] == 0:
        return x
    return torch.cat([x.narrow(dim, start, length) for start, length in parts], dim)
