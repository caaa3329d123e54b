"""From one global batch to what a rank needs, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from usp.batch import Batch, checked
from usp.host import sent
from usp.kernels.interface import PACKED
from usp.loss import IGNORE
from usp.mesh import MeshLike, P, Table, axis_sizes, local_slices, redistribute
from usp.mesh.devices import mesh_device
from usp.order import ring_degree, unit, unzigzag, zigzag
from usp.spans import Mask, features

__all__ = ["Batch", "Shard", "shard_batch", "unshard_batch"]
MOST_TOKENS = 2**31 - 1  # of one rank's whole rows: kernels count them in int32


class Shard(NamedTuple):
    """One rank's part of a batch, its rows cut over dp and its sequence as `table.tokens` says.

    Where the table makes a ring, the sequence is in ring order (`usp.order`) before it is cut.

    tokens, positions [b, s] int64, positions counted from each document's start. labels [b, s] int64,
    shifted: the target of the token at the same place, -100 for none. cu_seqlens int32 on the CPU: boundaries
    over the b rows of `seq_len` tokens laid end to end, whole sequences. num_valid: scalar, targets in the
    whole batch, all ranks. seq_len: padded global S. orig: (B, S) of the batch. num_ids: one more than the
    largest token or target of the whole batch. packed: whether some rank's rows hold documents of unequal
    length (a feature of kernels). The last two are what all ranks can refuse alike.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    num_valid: Tensor
    seq_len: int
    orig: tuple[int, int]
    num_ids: int
    packed: bool


def shard_batch(
    batch: Batch, *, table: Table, mesh: MeshLike, device: torch.device | str | None = None
) -> Shard:
    """This rank's `Shard` of `batch`; every rank passes the same batch. Does not communicate.

    Labels are shifted inside each document before anything is cut, so no target is lost at a shard's end.
    Rows are padded on the right to a multiple of the ranks that share them, and of 2 * ring; padding is a
    document of its own without targets. All of it happens on the host, which does not wait for a GPU that the
    shard goes to. Raises ValueError for types, shapes, boundaries or a batch size that do not fit.
    """
    tokens, labels, bounds = checked(batch)
    num_rows, seq_len = tokens.shape
    sizes = axis_sizes(mesh)
    num_dp = math.prod(sizes[a] for a in table.tokens[0])
    if num_rows % num_dp:
        raise ValueError(
            f"batch size={num_rows} must be a multiple of the ranks that share its rows, got "
            f"{table.tokens[0]}={num_dp}. Add rows, or lower dp."
        )
    degree = ring_degree(table, mesh)
    parts = math.lcm(math.prod(sizes[a] for a in table.tokens[1]), unit(degree))
    padded = -(-seq_len // parts) * parts
    group = num_rows // num_dp  # rows of one rank
    if group * padded > MOST_TOKENS:
        raise ValueError(
            f"batch size={num_rows} must leave a rank at most {MOST_TOKENS} tokens of whole rows, got "
            f"S={padded} and {group} rows. Use fewer rows at a time."
        )
    shifted, positions = torch.full_like(tokens, IGNORE), torch.empty_like(tokens)
    for row, edges in enumerate(bounds):
        for start, stop in pairwise(edges):
            shifted[row, start : stop - 1] = labels[row, start + 1 : stop]
            positions[row, start:stop] = torch.arange(stop - start)
    num_valid = (shifted != IGNORE).sum().double()
    num_ids = 1 + max(int(tokens.max()), int(shifted.max()))
    rows, cols = local_slices(table.tokens, (num_rows, padded), mesh)
    extra = padded - seq_len
    pad_positions = torch.arange(extra).expand(num_rows, -1)
    tokens = torch.cat([tokens, tokens.new_zeros(num_rows, extra)], 1)
    shifted = torch.cat([shifted, tokens.new_full((num_rows, extra), IGNORE)], 1)
    positions = torch.cat([positions, pad_positions], 1)
    tokens, shifted, positions = (zigzag(t, degree, dim=1) for t in (tokens, shifted, positions))
    groups = [_edges(bounds[i : i + group], padded) for i in range(0, num_rows, group)]
    masks = (Mask(edges, group, padded, True, None, 1.0, 0.0, degree) for edges in groups)
    target = mesh_device(mesh) if device is None else torch.device(device)
    return Shard(
        tokens=sent(tokens[rows, cols], target),
        labels=sent(shifted[rows, cols], target),
        positions=sent(positions[rows, cols], target),
        cu_seqlens=torch.tensor(groups[rows.start // group], dtype=torch.int32),
        num_valid=sent(num_valid, target),
        seq_len=padded,
        orig=(num_rows, seq_len),
        num_ids=num_ids,
        packed=any(PACKED in features(mask) for mask in masks),
    )


def _edges(bounds: Sequence[Sequence[int]], padded: int) -> tuple[int, ...]:
    """Document boundaries over rows laid end to end, each with its padding as one more document."""
    edges = [0]
    for i, row in enumerate(bounds):
        edges += [i * padded + edge for edge in dict.fromkeys((*row[1:], padded))]
    return tuple(edges)


def unshard_batch(x: Tensor, shard: Shard, *, table: Table, mesh: MeshLike) -> Tensor:
    """The global [B, S, ...] of a per-token x [b, s, ...] on every rank, in natural order, without padding.

    Gathers over the axes that shard `table.tokens`, one all-gather each.
    """
    trailing = (None,) * (x.dim() - 2)
    num_rows, seq_len = shard.orig
    shape = (num_rows, shard.seq_len, *x.shape[2:])
    whole = redistribute(x, P(*table.tokens.dims, *trailing), P(None, None, *trailing), mesh, shape=shape)
    return unzigzag(whole, ring_degree(table, mesh), dim=1)[:, :seq_len]
