"""Where the leaves of a bundle lie in its one flat buffer: arithmetic alone, no communication."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from usp.mesh.spec import Axes, P, local_range


@dataclass(frozen=True)
class Slot:
    """One leaf: `dim` is cut into `pieces`, (start, length) for each member of the group in rank order."""

    index: int
    dim: int
    full: tuple[int, ...]  # shape in use
    own: tuple[int, ...]  # shape at rest
    pieces: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        """Elements per unit of `dim`."""
        return math.prod(n for d, n in enumerate(self.full) if d != self.dim)

    @property
    def padded(self) -> int:
        """Elements reserved for it in each member's part."""
        return max(length for _, length in self.pieces) * self.rows

    @property
    def in_order(self) -> bool:
        """Whether the members' parts, one after the other, are the leaf itself."""
        lengths = [length for _, length in self.pieces]
        starts = [start for start, _ in self.pieces]
        return self.dim == 0 and min(lengths) == max(lengths) and starts == sorted(starts)

    def piece_shape(self, length: int) -> tuple[int, ...]:
        return (*self.full[: self.dim], length, *self.full[self.dim + 1 :])


def gathered_axes(src: P, dst: P, sizes: Mapping[str, int]) -> tuple[int, Axes, Axes] | None:
    """(dimension, axes kept, axes gathered) when dst keeps a prefix of the axes that cut one dimension.

    None where nothing moves. Raises LookupError for any other move.
    """
    found = None
    for dim, (before, after) in enumerate(zip(src.dims, dst.dims, strict=True)):
        had, has = (tuple(a for a in axes if sizes[a] > 1) for axes in (before, after))
        if had == has:
            continue
        if found is not None or had[: len(has)] != has:
            raise LookupError
        found = dim, has, had[len(has) :]
    if tuple(a for a in src.partial if sizes[a] > 1) or tuple(a for a in dst.partial if sizes[a] > 1):
        raise LookupError
    return found


def make_slot(
    index: int,
    src: P,
    dim: int,
    keep: Axes,
    shape: Sequence[int],
    *,
    sizes: Mapping[str, int],
    at: Mapping[str, int],
    members: Sequence[Mapping[str, int]],
) -> Slot:
    """`members`: coordinates, of the gathered axes at least, of each rank of the group, in rank order."""
    lengths = [local_range(n, axes, sizes, at)[1] for n, axes in zip(shape, src.dims, strict=True)]
    offset, in_use = local_range(shape[dim], keep, sizes, at)
    pieces = []
    for member in members:
        start, length = local_range(shape[dim], src[dim], sizes, {**at, **member})
        pieces.append((start - offset, length))
    own, full = tuple(lengths), list(lengths)
    full[dim] = in_use
    return Slot(index, dim, tuple(full), own, tuple(pieces))


def pack_shards(slots: Sequence[Slot], tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Own shards, one after the other, each padded to the largest in the group: [F]."""
    if len(slots) == 1 and slots[0].padded == tensors[0].numel():
        return tensors[0].to(dtype).contiguous().view(-1)
    flat = tensors[0].new_empty(sum(s.padded for s in slots), dtype=dtype)
    place = 0
    for slot, t in zip(slots, tensors, strict=True):
        flat[place : place + t.numel()].view(t.shape).copy_(t)
        flat[place + t.numel() : place + slot.padded].zero_()
        place += slot.padded
    return flat


def unpack_full(slots: Sequence[Slot], buffer: Tensor) -> list[Tensor]:
    """[members, F] -> every leaf whole. One copy a leaf; none for a single leaf that lies there already."""
    whole, place = [], 0
    for slot in slots:
        part = buffer.narrow(1, place, slot.padded)
        place += slot.padded
        if slot.in_order:
            whole.append(part.reshape(slot.full))
            continue
        order = sorted((start, member, length) for member, (start, length) in enumerate(slot.pieces))
        pieces = [
            part[member, : length * slot.rows].view(slot.piece_shape(length)) for _, member, length in order
        ]
        whole.append(torch.cat(pieces, slot.dim))
    return whole


def pack_full(slots: Sequence[Slot], tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Whole leaves -> [members, F], each member's piece in its row: the mirror of `unpack_full`."""
    members = len(slots[0].pieces)
    buffer = tensors[0].new_empty(members, sum(s.padded for s in slots), dtype=dtype)
    place = 0
    for slot, t in zip(slots, tensors, strict=True):
        part = buffer.narrow(1, place, slot.padded)
        place += slot.padded
        if slot.in_order:
            part.copy_(t.reshape(members, -1))
            continue
        for row, (start, length) in zip(part, slot.pieces, strict=True):
            row[: length * slot.rows].view(slot.piece_shape(length)).copy_(t.narrow(slot.dim, start, length))
            row[length * slot.rows :].zero_()
    return buffer


def unpack_shards(slots: Sequence[Slot], flat: Tensor) -> list[Tensor]:
    """[F] -> own shards, views of it: the mirror of `pack_shards`."""
    own, place = [], 0
    for slot in slots:
        own.append(flat[place : place + math.prod(slot.own)].view(slot.own))
        place += slot.padded
    return own


def alike(slots: Sequence[Slot], dtypes: Sequence[torch.dtype]) -> list[tuple[tuple[Slot, ...], torch.dtype]]:
    """Slots of one dtype together, in the order of the first of each."""
    groups: dict[torch.dtype, list[Slot]] = {}
    for slot, dtype in zip(slots, dtypes, strict=True):
        groups.setdefault(dtype, []).append(slot)
    return [(tuple(same), dtype) for dtype, same in groups.items()]
