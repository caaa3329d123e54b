"""From tables, boundaries and options to what attention runs on: the place in a ring, and the mask."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from usp.mesh import MeshLike, Table, coordinates
from usp.mesh.devices import group_name
from usp.order import ring_axes, ring_degree, unit
from usp.ring import Ring, gather_pays
from usp.spans import Mask

RINGS = ("auto", "p2p", "gather")
MOST_DOCUMENTS = 65535  # a CUDA grid's limit in its second and third dimension
_WHOLE = (torch.int32, torch.int64)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """ValueError unless they are what `usp.attention` takes, of one type and on one device."""
    for name, x in {"q": q, "k": k, "v": v, **({} if sinks is None else {"sinks": sinks})}.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            what = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name}={what} must be a tensor of floating point numbers. Convert it.")
        alike = x.dtype == q.dtype or name == "sinks"  # these are taken in the type of the log-sum-exp
        if not alike or x.device != q.device:
            raise ValueError(
                f"{name}={x.dtype} on {x.device} must be of the type of q and on its device, got "
                f"q={q.dtype} on {q.device}. Convert one of them."
            )
    fits = (
        q.dim() == k.dim() == v.dim() == 4
        and k.shape[:3] == v.shape[:3]
        and q.shape[:2] == k.shape[:2]
        and q.shape[3] == k.shape[3]
    )
    if not fits or (k.shape[2] < 1 and q.shape[2]) or q.shape[2] % max(k.shape[2], 1):
        raise ValueError(
            f"k={tuple(k.shape)}, v={tuple(v.shape)} must be [B, S, K, H] with N a multiple of K, got "
            f"q={tuple(q.shape)} as [B, S, N, H]. Move them with seq_to_heads first."
        )
    if 0 in (*q.shape[:2], q.shape[3], v.shape[3]):  # a rank may have no heads
        raise ValueError(
            f"q={tuple(q.shape)} must have B, S and H of at least 1, got v={tuple(v.shape)}. Leave out empty "
            f"batches."
        )
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(
            f"sinks={tuple(sinks.shape)} must hold one score per head of this rank, got q={tuple(q.shape)}. "
            f"Pass [N], cut as the heads are."
        )


def check_documents(number: int) -> None:
    """ValueError for more documents in one rank's rows than a kernel takes at once."""
    if number > MOST_DOCUMENTS:
        raise ValueError(
            f"cu_seqlens must hold at most {MOST_DOCUMENTS} documents for one rank, as many as one launch of "
            f"a GPU kernel takes, got {number}. Spread them over more batches."
        )


def ring_of(
    length: int, num_heads: int, num_kv_heads: int, table: Table | None, mesh: MeshLike | None, exchange: str
) -> Ring:
    """Where this rank sits in the ring that `table` makes; `length`: tokens of a row on one rank."""
    if exchange not in RINGS:
        raise ValueError(f"exchange={exchange!r} must be one of {', '.join(RINGS)}. Choose one of them.")
    if (table is None) != (mesh is None):
        raise ValueError("table and mesh must be given together, got one of them. Pass both or neither.")
    axes = [] if table is None or mesh is None else list(ring_axes(table, mesh))
    if table is None or mesh is None or not axes:
        if exchange != "auto":
            raise ValueError(
                f"exchange={exchange!r} must go with a table that leaves attention's sequence sharded, got a "
                f"whole sequence. Leave it out, or choose another table."
            )
        return Ring()
    if len(axes) > 1:
        raise ValueError(
            f"table={table.name!r} must leave one axis larger than 1 on attention's sequence, got "
            f"{', '.join(axes)}. Give one of them size 1, or move it to the heads."
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
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"window={window} must be a whole number of at least 1. Leave it out for none.")
    if softcap is not None and not (isinstance(softcap, (int, float)) and 0 < softcap < math.inf):
        raise ValueError(f"softcap={softcap} must be a number above 0. Leave it out for none.")
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale={scale} must be a finite number, not a tensor. Scale q instead.")
    edges = tuple(range(0, rows * length + 1, length))
    if cu_seqlens is not None:
        edges = _boundaries(cu_seqlens, edges)
    window = None if window is None or window >= length else window
    return Mask(edges, rows, length, causal, window, scale, softcap or 0.0, degree)


def _boundaries(cu_seqlens: Any, row_edges: tuple[int, ...]) -> tuple[int, ...]:
    """Document boundaries as host integers; they must rise and hold every end of a row."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.dtype not in _WHOLE:
        given = isinstance(cu_seqlens, Tensor)
        what = f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}" if given else type(cu_seqlens).__name__
        raise ValueError(
            f"cu_seqlens={what} must be whole numbers in one dimension, such as int32. Give a tensor of "
            f"document boundaries over all rows."
        )
    if cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens must be on the CPU, got {cu_seqlens.device}: reading it would wait for the device. "
            f"Keep it where shard_batch made it."
        )
    check_documents(len(cu_seqlens) - 1)
    edges = tuple(cu_seqlens.tolist())
    rising = all(a < b for a, b in pairwise(edges))
    if not rising or edges[:1] != (0,) or edges[-1] != row_edges[-1] or not set(row_edges) <= set(edges):
        raise ValueError(
            f"cu_seqlens must rise from 0 to B * S through the end of every row, got B={len(row_edges) - 1}, "
            f"S={row_edges[1]}. Pass boundaries of whole sequences, and end documents where rows end."
        )
    return edges
