"""From one global batch to what a rank needs, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from usp.loss import IGNORE
from usp.mesh import MeshLike, P, Table, axis_sizes, local_slices, redistribute
from usp.mesh.devices import mesh_device
from usp.order import ring_degree, unit, unzigzag, zigzag


class Batch(NamedTuple):
    """A global batch, the same on every rank.

    tokens [B, S] int64. labels [B, S] int64, NOT shifted, -100 where a token is no target; None: the tokens.
    cu_seqlens: for each of the B rows its document boundaries, from 0 to S; None: one document a row.
    valid [B, S] bool: False on padding, which must end a row; None: no padding.
    """

    tokens: Tensor
    labels: Tensor | None = None
    cu_seqlens: Sequence[Sequence[int] | Tensor] | None = None
    valid: Tensor | None = None


class Shard(NamedTuple):
    """One rank's part of a batch, its rows cut over dp and its sequence as `table.tokens` says.

    Where the table makes a ring, the sequence is in ring order (`usp.order`) before it is cut.

    tokens, positions [b, s] int64, positions counted from each document's start. labels [b, s] int64,
    shifted: the target of the token at the same place, -100 for none. cu_seqlens int32 on the CPU: boundaries
    over the b rows of `seq_len` tokens laid end to end, whole sequences. num_valid: scalar, targets in the
    whole batch, all ranks. seq_len: padded global S. orig: (B, S) of the batch.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    num_valid: Tensor
    seq_len: int
    orig: tuple[int, int]


def shard_batch(
    batch: Batch, *, table: Table, mesh: MeshLike, device: torch.device | str | None = None
) -> Shard:
    """This rank's `Shard` of `batch`; every rank passes the same batch. Does not communicate.

    Labels are shifted inside each document before anything is cut, so no target is lost at a shard's end.
    Rows are padded on the right to a multiple of the ranks that share them, and of 2 * ring; padding is a
    document of its own without targets. Raises ValueError for shapes, boundaries or a batch size that do not
    fit.
    """
    tokens, labels, bounds = _checked(batch)
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
    shifted, positions = torch.full_like(tokens, IGNORE), torch.empty_like(tokens)
    for row, edges in enumerate(bounds):
        for start, stop in pairwise(edges):
            shifted[row, start : stop - 1] = labels[row, start + 1 : stop]
            positions[row, start:stop] = torch.arange(stop - start)
    num_valid = (shifted != IGNORE).sum().double()
    rows, cols = local_slices(table.tokens, (num_rows, padded), mesh)
    extra = padded - seq_len
    pad_positions = torch.arange(extra).expand(num_rows, -1)
    tokens = torch.cat([tokens, tokens.new_zeros(num_rows, extra)], 1)
    shifted = torch.cat([shifted, tokens.new_full((num_rows, extra), IGNORE)], 1)
    positions = torch.cat([positions, pad_positions], 1)
    tokens, shifted, positions = (zigzag(t, degree, dim=1) for t in (tokens, shifted, positions))
    edges = [0]
    for i, row in enumerate(range(rows.start, rows.stop)):
        edges += [i * padded + edge for edge in bounds[row][1:]] + ([(i + 1) * padded] if extra else [])
    target = mesh_device(mesh) if device is None else torch.device(device)
    return Shard(
        tokens=tokens[rows, cols].to(target),
        labels=shifted[rows, cols].to(target),
        positions=positions[rows, cols].to(target),
        cu_seqlens=torch.tensor(edges, dtype=torch.int32),
        num_valid=num_valid.to(target),
        seq_len=padded,
        orig=(num_rows, seq_len),
    )


def unshard_batch(x: Tensor, shard: Shard, *, table: Table, mesh: MeshLike) -> Tensor:
    """The global [B, S, ...] of a per-token x [b, s, ...] on every rank, in natural order, without padding.

    Gathers over the axes that shard `table.tokens`, one all-gather each.
    """
    trailing = (None,) * (x.dim() - 2)
    num_rows, seq_len = shard.orig
    shape = (num_rows, shard.seq_len, *x.shape[2:])
    whole = redistribute(x, P(*table.tokens.dims, *trailing), P(None, None, *trailing), mesh, shape=shape)
    return unzigzag(whole, ring_degree(table, mesh), dim=1)[:, :seq_len]


def _checked(batch: Batch) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Tokens, labels and document boundaries on the CPU, padding made a document without targets."""
    tokens = batch.tokens.cpu()
    if tokens.dim() != 2 or tokens.dtype != torch.int64 or 0 in tokens.shape:
        raise ValueError(
            f"tokens={tuple(tokens.shape)} {tokens.dtype} must be int64 [B, S] with B and S at least 1. "
            f"Stack the rows, and call .long()."
        )
    labels = tokens if batch.labels is None else batch.labels.cpu()
    for name, other in (("labels", labels), ("valid", batch.valid)):
        if other is not None and other.shape != tokens.shape:
            raise ValueError(
                f"{name}={tuple(other.shape)} must have the shape of tokens, got {tuple(tokens.shape)}. "
                f"Pass one entry per token (labels not shifted)."
            )
    wrong = int(tokens.min()), int(labels.where(labels != IGNORE, 0).min())
    if min(wrong) < 0:
        raise ValueError(
            f"tokens and labels must be 0 or more, or {IGNORE} for a label that does not count, got "
            f"{min(wrong)}. Correct the batch."
        )
    num_rows, seq_len = tokens.shape
    if batch.cu_seqlens is None:
        bounds = [[0, seq_len] for _ in range(num_rows)]
    else:
        bounds = [[int(edge) for edge in row] for row in batch.cu_seqlens]
    if len(bounds) != num_rows:
        raise ValueError(
            f"cu_seqlens must have one entry per row, got {len(bounds)} for B={num_rows}. Add the rows."
        )
    for row, edges in enumerate(bounds):
        rising = all(a < b for a, b in pairwise(edges))
        if len(edges) < 2 or edges[0] != 0 or edges[-1] != seq_len or not rising:
            raise ValueError(
                f"cu_seqlens[{row}]={edges} must rise from 0 to S, got S={seq_len}. Give each row's document "
                f"boundaries over the whole sequence."
            )
    if batch.valid is not None:
        labels, bounds = _without_padding(batch.valid.cpu().bool(), labels, bounds)
    return tokens, labels, bounds


def _without_padding(
    valid: Tensor, labels: Tensor, bounds: list[list[int]]
) -> tuple[Tensor, list[list[int]]]:
    """Labels without padding, and boundaries at which the padding of a row is one document."""
    seq_len = valid.shape[1]
    lengths = valid.sum(1)
    if not torch.equal(valid, torch.arange(seq_len) < lengths.unsqueeze(1)):
        raise ValueError(
            "valid must be True, then False, along each row, got padding before tokens. Pad on the right."
        )
    cut = []
    for edges, length in zip(bounds, lengths.tolist(), strict=True):
        inside = [edge for edge in edges if edge < length]
        cut.append([*inside, *dict.fromkeys((length, seq_len))] if length else [0, seq_len])
    return labels.where(valid, IGNORE), cut
