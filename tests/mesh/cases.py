"""Rank-coded inputs cut from one global tensor, and the check that local values stand for such a tensor."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from usp.mesh import P, axis_sizes, build_mesh, coordinates, local_slices
from usp.mesh.devices import AXES

Sizes = tuple[int, int, int]  # dp, ring, ulysses

SPECS_1D = (  # every placement of [B, S, N] over one axis
    P("ulysses", None, None),
    P(None, "ulysses", None),
    P(None, None, "ulysses"),
    P(None, None, None),
    P(None, None, None, partial="ulysses"),
)


def specs_2d(outer: str, inner: str) -> tuple[P, ...]:
    """Placements of [B, S, N] over two axes: both on one dimension in either order, apart, one, sums."""
    return (
        P(None, None, None),
        P(None, (outer, inner), None),
        P(None, (inner, outer), None),
        P(None, None, (outer, inner)),
        P(None, outer, inner),
        P(outer, inner, None),
        P(inner, None, outer),
        P(None, inner, None),
        P(None, None, outer),
        P(None, None, None, partial=(outer, inner)),
        P(None, None, inner, partial=outer),
        P(outer, None, None, partial=inner),
    )


def pairs(specs: tuple[P, ...]) -> list[tuple[P, P]]:
    return list(product(specs, specs))


@cache
def mesh_of(sizes: Sizes) -> DeviceMesh:
    """All ranks, or the first of them (a mesh of 2 or 3 on 4 ranks); to be called on every rank."""
    count = math.prod(sizes)
    if count == dist.get_world_size():
        return build_mesh(dp=sizes[0], ring=sizes[1], ulysses=sizes[2])
    return DeviceMesh("cpu", torch.arange(count).view(sizes), mesh_dim_names=AXES)


def outside(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is None


def dense(shape: tuple[int, ...], *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Whole numbers, different everywhere (seed 0) or small and random: exact in float64 under any order."""
    if seed == 0:
        return torch.arange(1, math.prod(shape) + 1, dtype=dtype).view(shape)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def summand(mesh: DeviceMesh, axes: tuple[str, ...]) -> tuple[int, int]:
    """(index of this rank, number of ranks) among those that hold the summands of one value."""
    sizes, at = axis_sizes(mesh), coordinates(mesh)
    index = 0
    for axis in axes:
        index = index * sizes[axis] + at[axis]
    return index, math.prod(sizes[a] for a in axes)


def shard(x: Tensor, spec: P, mesh: DeviceMesh) -> Tensor:
    """This rank's part of a global x; where `spec` has a pending sum, a summand, different on each rank."""
    part = x[local_slices(spec, tuple(x.shape), mesh)].clone()
    index, count = summand(mesh, spec.partial)
    if count == 1:
        return part
    others = [dense(tuple(x.shape), seed=100 + i).to(x.dtype) for i in range(1, count)]
    full = others[index - 1] if index else x - sum(others, torch.zeros_like(x))
    return full[local_slices(spec, tuple(x.shape), mesh)].clone()


def total(local: Tensor, spec: P, mesh: DeviceMesh) -> Tensor:
    """`local` with its pending sums taken, by plain c10d."""
    out = local.detach().clone().contiguous()
    for axis in spec.partial:
        dist.all_reduce(out, group=mesh.get_group(axis))
    return out


def assert_stands_for(local: Tensor, spec: P, mesh: DeviceMesh, want: Tensor, note: str = "") -> None:
    """`local` is, element for element, this rank's part of `want` placed by `spec`."""
    got, part = total(local, spec, mesh), want[local_slices(spec, tuple(want.shape), mesh)]
    assert got.shape == part.shape, f"{note}: shape {tuple(got.shape)}, want {tuple(part.shape)} at {spec}"
    assert got.dtype == part.dtype, f"{note}: dtype {got.dtype}"
    if got.dtype.itemsize == 1:  # float8 has no torch.equal
        got, part = got.view(torch.uint8), part.view(torch.uint8)
    assert torch.equal(got, part), f"{note}: placed {spec}\n{got}\nwant\n{part}"
