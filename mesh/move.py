"""`Move`: one change of placement as a linear map of local shards: its program, its transpose.

A move is linear, so its derivative is itself and its transpose is the move between the dual placements
(`usp.mesh.spec.dual`): all-to-all <-> all-to-all back, gather <-> reduce-scatter, all-reduce <-> all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from usp.mesh import collectives
from usp.mesh.constants import constant
from usp.mesh.devices import MeshLike, axis_sizes, coordinates, group_name
from usp.mesh.plan import REDUCES, find_steps
from usp.mesh.spec import Axes, P, chunk, chunk_lengths, dual


@dataclass(frozen=True)
class Move:
    """Everything about one redistribute but the tensor.

    `turns` counts transpositions. Gradients of local shards are placed by `dual`; with `summed`, as DTensor
    has it, they carry no pending sum and a replicated one is the same on every rank.
    """

    src: P
    dst: P
    mesh: MeshLike
    shape: tuple[int, ...] | None
    reduce_dtype: torch.dtype | None
    turns: int = 0
    summed: bool = False

    def transposed(self) -> Move:
        return replace(self, turns=self.turns + 1)

    def batched(self, size: int) -> Move:
        """The same move with one more, replicated, leading dimension (for vmap)."""
        src, dst = (P(None, *spec.dims, partial=spec.partial) for spec in (self.src, self.dst))
        shape = None if self.shape is None else (size, *self.shape)
        return replace(self, src=src, dst=dst, shape=shape)

    def empty(self) -> bool:
        return not self.program()

    def program(self) -> tuple[Instruction, ...]:
        if isinstance(self.mesh, DeviceMesh):
            program: tuple[Instruction, ...] = _program(
                _plain(self.src), _plain(self.dst), self.mesh, self.turns, self.summed
            )
            return program
        coordinates(self.mesh)  # a mapping stands for one process, where nothing moves
        return ()

    def run(self, x: Tensor) -> Tensor:
        """Carry out the program; the result shares no memory with x unless there is nothing to do."""
        program = self.program()
        if self.shape is None:
            _check_even(x.shape, program)
        dtype, wide = x.dtype, collectives.sum_dtype(x.dtype, self.reduce_dtype)
        sums = [i for i, instruction in enumerate(program) if instruction[0] in REDUCES]
        for i, instruction in enumerate(program):
            x = x.to(wide) if i in sums[:1] else x  # one rounding at the end, also of a sum over several axes
            x = _execute(x, instruction, self.shape)
            x = x.to(dtype) if i in sums[-1:] else x
        return x


Instruction = tuple[str, int, int, int, int, tuple[tuple[int, int], ...], str]
"""One step for this rank: kind, dim, to_dim, number of ranks, own index, the same two numbers of each axis
that cuts `dim` further out, group."""

Plain = tuple[tuple[Axes, ...], Axes]  # a spec as tuples, which torch.compile 2.11 takes for a constant


def _plain(spec: P) -> Plain:
    return spec.dims, spec.partial


@constant
def _program(
    source: Plain, target: Plain, mesh: DeviceMesh, turns: int, summed: bool
) -> tuple[Instruction, ...]:
    """The plan as plain numbers, remembered; inside torch.compile they are constants of the program."""
    src, dst = (P(*dims, partial=partial) for dims, partial in (source, target))
    if turns and summed:
        src, dst = src.reduced(), dst.reduced()
    if turns % 2:
        src, dst = (dst, src) if summed else (dual(dst, mesh), dual(src, mesh))
    sizes, at = axis_sizes(mesh), coordinates(mesh)
    program = _compile(src, dst, tuple(sizes.items()), tuple(at.items()))
    # group names are looked up each time: an equal mesh may belong to another process group by now
    return tuple((*step, group_name(mesh, axis)) for axis, *step in program)


Sized = tuple[tuple[str, int], ...]


@lru_cache(maxsize=4096)
def _compile(src: P, dst: P, mesh_sizes: Sized, mesh_at: Sized) -> tuple[tuple[Any, ...], ...]:
    """Instructions with the axis in front in place of the group at the end."""
    sizes, at = dict(mesh_sizes), dict(mesh_at)
    program = []
    for step in find_steps(src, dst, mesh_sizes):
        dim, to = (-1 if d is None else d for d in (step.dim, step.to_dim))
        outer = () if step.dim is None else tuple((sizes[a], at[a]) for a in step.before[dim][:-1])
        program.append((step.axis, step.kind, dim, to, sizes[step.axis], at[step.axis], outer))
    return tuple(program)


def _check_even(local: Sequence[int], program: Sequence[Instruction]) -> None:
    """Walk through the program with sizes alone, so that what cannot be cut evenly is refused at once."""
    lengths = list(local)
    for _, dim, to, parts, *_ in program:
        if dim >= 0:
            lengths[dim] *= parts
        if to >= 0 and lengths[to] % parts:
            raise ValueError(
                f"shape=None must mean even shards, got dimension {to} of {lengths[to]} over {parts} ranks. "
                f"Pass shape= with the global shape."
            )
        if to >= 0:
            lengths[to] //= parts


def _execute(x: Tensor, instruction: Instruction, shape: tuple[int, ...] | None) -> Tensor:
    kind, dim, to, parts, index, outer, group = instruction
    length = -1  # of `dim`, before this axis cut it
    if dim >= 0:
        length = x.shape[dim] * parts if shape is None else shape[dim]
        for count, at in outer if shape is not None else ():
            length = chunk(length, count, at)[1]
    if kind == "all_to_all":
        split, cat = chunk_lengths(x.shape[to], parts), chunk_lengths(length, parts)
        return collectives.all_to_all(
            x, group, index=index, split_dim=to, split_sizes=split, cat_dim=dim, cat_sizes=cat
        )
    if kind == "all_gather":
        return collectives.all_gather(x, group, dim=dim, length=length, parts=parts)
    if kind == "reduce_scatter":
        own = chunk(x.shape[to], parts, index)[1]
        return collectives.reduce_scatter(x, group, dim=to, own=own, parts=parts)
    if kind == "all_reduce":
        return collectives.all_reduce(x, group)
    if kind == "slice":
        return x.narrow(to, *chunk(x.shape[to], parts, index)).clone()
    if kind == "pad":
        start, own = chunk(length, parts, index)
        before, after = list(x.shape), list(x.shape)
        before[dim], after[dim] = start, length - start - own
        return torch.cat([x.new_zeros(before), x, x.new_zeros(after)], dim)
    assert kind == "mask", kind
    return x.clone() if index == 0 else torch.zeros_like(x)
