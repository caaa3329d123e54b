"""`P`: which mesh axes shard which tensor dimension, and the arithmetic of shards.

Shards follow `torch.chunk`: a dimension of n over k ranks is cut into pieces of ceil(n / k), so trailing
ranks may hold less, or nothing. A dimension over several axes is cut by the outermost axis first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from usp.mesh.devices import MeshLike, axis_sizes, coordinates

Axes = tuple[str, ...]


@dataclass(frozen=True, init=False)
class P:
    """Placement of one tensor: per dimension the mesh axes that shard it, outermost first.

    `P("dp", ("ring", "ulysses"), None)` shards dimension 0 over dp, dimension 1 over ring then ulysses, and
    keeps dimension 2 whole. Axes that appear nowhere hold replicas. `partial` names axes over which the value
    is a sum that has not been taken yet. Raises ValueError when an axis is used twice.
    """

    dims: tuple[Axes, ...]
    partial: Axes

    def __init__(self, *dims: str | Axes | list[str] | None, partial: str | Axes | list[str] = ()) -> None:
        object.__setattr__(self, "dims", tuple(_axes(d) for d in dims))
        object.__setattr__(self, "partial", tuple(sorted(_axes(partial))))
        used = [a for axes in self.dims for a in axes] + list(self.partial)
        for axis in used:
            if used.count(axis) > 1:
                raise ValueError(f"axis={axis!r} must appear once in a spec, got {self!r}. Remove one use.")

    def __repr__(self) -> str:
        def one(axes: Axes) -> str:
            return "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(axes)

        parts = [one(axes) for axes in self.dims]
        if self.partial:
            parts.append(f"partial={one(self.partial)}")
        return f"P({', '.join(parts)})"

    def __len__(self) -> int:
        return len(self.dims)

    def __getitem__(self, dim: int) -> Axes:
        return self.dims[dim]

    @property
    def axes(self) -> frozenset[str]:
        """Every axis that shards a dimension or is partial."""
        return frozenset(a for axes in self.dims for a in axes) | frozenset(self.partial)

    def reduced(self) -> P:
        """The same placement with every pending sum taken."""
        return P(*self.dims)


def _axes(dim: str | Axes | list[str] | None) -> Axes:
    if dim is None:
        return ()
    if isinstance(dim, str):
        return (dim,)
    if not isinstance(dim, tuple | list) or not all(isinstance(a, str) for a in dim):
        raise ValueError(f"spec entry={dim!r} must be None, an axis name or a tuple of names. Fix the entry.")
    return tuple(dim)


def check_spec(spec: P, mesh: MeshLike, ndim: int, name: str = "spec") -> dict[str, int]:
    """Axis sizes of `mesh`, after checking that `spec` fits it and a tensor of `ndim` dimensions."""
    sizes = axis_sizes(mesh)
    if len(spec) != ndim:
        raise ValueError(
            f"{name}={spec} must name {ndim} dimensions, got {len(spec)}. "
            f"Write None for a dimension kept whole."
        )
    unknown = sorted(spec.axes - set(sizes))
    if unknown:
        raise ValueError(
            f"{name}={spec} must use axes of the mesh, got {unknown}. "
            f"The mesh has {sorted(sizes)}; rename the axis."
        )
    return sizes


def dual(spec: P, mesh: MeshLike) -> P:
    """Placement of the gradient of a value placed by `spec`: replicated <-> partial, sharded stays.

    The objective is the sum over ranks of what each rank returns, so each copy of a replicated value receives
    its own contribution, and every summand of a partial value receives the whole gradient.
    """
    free = [a for a in axis_sizes(mesh) if a not in spec.axes]
    return P(*spec.dims, partial=tuple(free))


def replicas(spec: P, mesh: MeshLike) -> int:
    """Number of ranks that hold a copy of each element: 1 when every axis shards it (or sums it)."""
    sizes = check_spec(spec, mesh, len(spec))
    return math.prod(size for axis, size in sizes.items() if axis not in spec.axes)


def chunk(n: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of piece `index` when `n` is cut into `parts` by the ceil rule of `torch.chunk`."""
    step = -(-n // parts)
    start = min(index * step, n)
    return start, min(step, n - start)


def chunk_lengths(n: int, parts: int) -> list[int]:
    """Lengths of all pieces of `n` cut into `parts`."""
    return [chunk(n, parts, i)[1] for i in range(parts)]


def local_range(n: int, axes: Axes, sizes: Mapping[str, int], coords: Mapping[str, int]) -> tuple[int, int]:
    """(start, length) of the part of a dimension of `n` held at `coords`."""
    start = 0
    for axis in axes:
        offset, n = chunk(n, sizes[axis], coords[axis])
        start += offset
    return start, n


def local_slices(
    spec: P, shape: tuple[int, ...], mesh: MeshLike, coords: Mapping[str, int] | None = None
) -> tuple[slice, ...]:
    """Slices that cut this rank's shard out of a global tensor of `shape`.

    `coords` maps axes to coordinates; without it, those of the calling rank. Raises ValueError for a bad
    spec.
    """
    sizes = check_spec(spec, mesh, len(shape))
    at = coordinates(mesh) if coords is None else coords
    ranges = [local_range(n, axes, sizes, at) for n, axes in zip(shape, spec.dims, strict=True)]
    return tuple(slice(start, start + length) for start, length in ranges)


def local_shape(
    spec: P, shape: tuple[int, ...], mesh: MeshLike, coords: Mapping[str, int] | None = None
) -> tuple[int, ...]:
    """Shape of this rank's shard of a global tensor of `shape`; arguments as in `local_slices`."""
    return tuple(s.stop - s.start for s in local_slices(spec, shape, mesh, coords))
