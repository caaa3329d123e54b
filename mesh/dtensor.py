"""Between our specs and DTensor's placements, and through the wrappers that torch.func puts around one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from usp.mesh.devices import axis_sizes
from usp.mesh.spec import P


def placements_of(spec: P, mesh: DeviceMesh) -> list[Placement]:
    """DTensor's placements, one per mesh axis, for `spec`.

    DTensor nests the axes of one dimension in mesh order; another order raises ValueError.
    """
    names = list(axis_sizes(mesh))
    for axes in spec.dims:
        if list(axes) != sorted(axes, key=names.index):
            raise ValueError(
                f"spec={spec} must name the axes of one dimension in mesh order {names} to become a DTensor. "
                f"Reorder them, or keep local shards."
            )
    where: dict[str, Placement] = {a: Shard(dim) for dim, axes in enumerate(spec.dims) for a in axes}
    where |= {axis: Partial() for axis in spec.partial}
    return [where.get(axis, Replicate()) for axis in names]


def spec_from(placements: tuple[Placement, ...], mesh: DeviceMesh, ndim: int) -> P:
    """The spec of DTensor `placements` on `mesh`; ValueError for strided shards, pending max, min and avg."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    partial = []
    for axis, placement in zip(axis_sizes(mesh), placements, strict=True):
        if type(placement) is Shard:
            dims[placement.dim % ndim].append(axis)
        elif type(placement) is Partial and placement.reduce_op == "sum":
            partial.append(axis)
        elif type(placement) is not Replicate:
            raise ValueError(
                f"placement={placement} on axis {axis!r} must be Shard, Replicate or a pending sum. "
                f"Redistribute the DTensor to such a placement first."
            )
    return P(*[tuple(d) for d in dims], partial=tuple(partial))


NO_VMAP = "vmap must not batch a DTensor: its placements would be hidden. Use shard_map, and vmap inside it."


def unwrapped(x: Tensor) -> Tensor:
    """The tensor below all torch.func wrappers. (Inside torch.compile itself: dynamo sees through.)"""
    if torch.compiler.is_compiling():
        return x
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def spec_of(x: Tensor) -> P:
    """Placement of a DTensor, also of one that torch.func.grad, vjp or jvp has wrapped."""
    inner = unwrapped(x)
    assert isinstance(inner, DTensor)
    if inner.dim() != x.dim():
        raise NotImplementedError(NO_VMAP)
    return spec_from(inner.placements, inner.device_mesh, x.dim())


def global_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of `shape`."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
