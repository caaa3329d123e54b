"""From tables, boundaries and options to what attention runs on: the place in a ring, and the mask."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import Tensor

from usp.mesh import MeshLike, Table, coordinates
from usp.mesh.devices import group_name
from usp.order import ring_axes, ring_degree, unit
from usp.ring import Ring, gather_pays
from usp.spans import Mask

RINGS = ("auto", "p2p", "gather")


def ring_of(
    length: int, num_heads: int, num_kv_heads: int, table: Table | None, mesh: MeshLike | None, exchange: str
) -> Ring:
    """Where this rank sits in the ring that `table` makes; `length`: tokens of a row on one rank."""
    if exchange not in RINGS:
        raise ValueError(f"exchange={exchange!r} must be one of {', '.join(RINGS)}. Choose one of them.")
    if (table is None) != (mesh is None):
        raise ValueError("table and mesh must be given together, got one of them. Pass both or neither.")
    axes: tuple[str, ...] = ()
    if table is not None and mesh is not None:
        axes = ring_axes(table, mesh)
    if table is None or mesh is None or not axes:
        if exchange != "auto":
            raise ValueError(
                f"exchange={exchange!r} must go with a table that leaves attention's sequence sharded, got a "
                f"whole sequence. Leave it out, or choose another table."
            )
        return Ring()
    if len(axes) > 1:
        raise ValueError(
            f"table={table.name!r} must leave one axis larger than 1 on attention's sequence, got {axes}. "
            f"Give one of them size 1, or move it to the heads."
        )
    degree = ring_degree(table, mesh)
    if length % 2:
        raise ValueError(
            f"S={length} on one rank must be even for a ring, got ring degree={degree}. "
            f"Let shard_batch pad the sequence to a multiple of {unit(degree)}."
        )
    gather = exchange == "gather" or (exchange == "auto" and gather_pays(num_heads, num_kv_heads, degree))
    return Ring(group_name(mesh, axes[0]), degree, coordinates(mesh)[axes[0]], gather)


def mask_of(
    rows: int,
    length: int,
    degree: int,
    *,
    cu_seqlens: Tensor | None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float,
) -> Mask:
    """The mask of `rows` whole sequences of `length` tokens that `degree` ranks share."""
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window={window} must be a whole number of at least 1. Leave it out for none.")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap} must be a number above 0. Leave it out for none.")
    if isinstance(scale, Tensor) or not math.isfinite(scale):
        raise ValueError(f"scale={scale} must be a finite number, not a tensor. Scale q instead.")
    edges = tuple(range(0, rows * length + 1, length))
    if cu_seqlens is not None:
        edges = _boundaries(cu_seqlens, edges)
    window = None if window is None or window >= length else window
    return Mask(edges, rows, length, causal, window, scale, softcap or 0.0, degree)


def _boundaries(cu_seqlens: Tensor, row_edges: tuple[int, ...]) -> tuple[int, ...]:
    """Document boundaries as host integers; they must rise and hold every end of a row."""
    if cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens must be on the CPU, got {cu_seqlens.device}: reading it would wait for the device. "
            f"Keep it where shard_batch made it."
        )
    edges = tuple(cu_seqlens.tolist())
    rising = all(a < b for a, b in pairwise(edges))
    if not rising or edges[:1] != (0,) or edges[-1] != row_edges[-1] or not set(row_edges) <= set(edges):
        raise ValueError(
            f"cu_seqlens must rise from 0 to B * S through the end of every row, got B={len(row_edges) - 1}, "
            f"S={row_edges[1]}. Pass boundaries of whole sequences, and end documents where rows end."
        )
    return edges
