"""From one global batch to what a rank needs, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from usp.batch import IGNORE, Batch, checked
from usp.host import sent
from usp.kernels.interface import PACKED
from usp.mesh import MeshLike, P, Table, axis_sizes, local_slices, redistribute
from usp.mesh.devices import mesh_device
from usp.order import ring_degree, unit, unzigzag, zigzag
from usp.setting import check_documents
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


def check_tokens(num_rows: int, group: int, padded: int) -> None:
    """ValueError where `group` of the batch's rows, those of one rank, are more than kernels count."""
    if group * padded > MOST_TOKENS:
        raise ValueError(
            f"batch size={num_rows} must leave a rank at most {MOST_TOKENS} tokens of whole rows, got "
            f"S={padded} and {group} rows. Use fewer rows at a time, or shorter ones."
        )


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
    check_tokens(num_rows, group, padded)
    targets, positions = shifted(labels, bounds), torch.empty_like(tokens)
    for row, edges in enumerate(bounds):
        for start, stop in pairwise(edges):
            positions[row, start:stop] = torch.arange(stop - start)
    num_valid = (targets != IGNORE).sum().double()
    num_ids = 1 + max(int(tokens.max()), int(targets.max()))
    groups = [_edges(bounds[i : i + group], padded) for i in range(0, num_rows, group)]
    check_documents(max(len(edges) for edges in groups) - 1)  # of every rank, so that all refuse alike
    first = local_slices(table.tokens, (num_rows, padded), mesh)[0].start // group
    pad_positions = torch.arange(padded - seq_len).expand(num_rows, -1)
    positions = torch.cat([positions, pad_positions], 1)
    masks = (Mask(edges, group, padded, True, None, 1.0, 0.0, degree) for edges in groups)
    target = mesh_device(mesh) if device is None else torch.device(device)

    def own(x: Tensor, fill: int) -> Tensor:
        return sent(place_tokens(x, fill, seq_len=padded, table=table, mesh=mesh), target)

    return Shard(
        tokens=own(tokens, 0),
        labels=own(targets, IGNORE),
        positions=own(positions, 0),
        cu_seqlens=torch.tensor(groups[first], dtype=torch.int32),
        num_valid=sent(num_valid, target),
        seq_len=padded,
        orig=(num_rows, seq_len),
        num_ids=num_ids,
        packed=any(PACKED in features(mask) for mask in masks),
    )


def shifted(labels: Tensor, bounds: Sequence[Sequence[int]]) -> Tensor:
    """[B, S]: the target of the token at each place, the label of the next; -100 where its document ends."""
    targets = torch.full_like(labels, IGNORE)
    for row, edges in enumerate(bounds):
        for start, stop in pairwise(edges):
            targets[row, start : stop - 1] = labels[row, start + 1 : stop]
    return targets


def place_tokens(x: Tensor, fill: float, *, seq_len: int, table: Table, mesh: MeshLike) -> Tensor:
    """[B, S] of a whole batch -> this rank's [b, s], as `shard_batch` cuts tokens; `seq_len`: padded S.

    Padding is `fill`. Does not communicate.
    """
    x = torch.nn.functional.pad(x, (0, seq_len - x.shape[1]), value=fill)
    x = zigzag(x, ring_degree(table, mesh), dim=1)
    return x[local_slices(table.tokens, tuple(x.shape), mesh)]


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
