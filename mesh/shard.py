"""`shard_map`: DTensors outside, local shards inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from usp.mesh.dtensor import NO_VMAP, global_stride, placements_of, spec_of, unwrapped
from usp.mesh.redistribute import redistribute
from usp.mesh.spec import P, check_spec, dual, local_shape


def shard_map(
    fn: Callable[..., Any],
    mesh: DeviceMesh,
    in_specs: Any,
    out_specs: Any,
    *,
    out_shapes: Any = None,
) -> Callable[..., Any]:
    """`fn` on local shards, as a function of DTensors.

    `in_specs` is a tuple with one entry per argument, `out_specs` is like the result of `fn`; an entry may be
    a `P` that holds for every tensor of a pytree, or a pytree of them (None for what is not a tensor). An
    argument placed otherwise is moved first. `out_shapes`, like `out_specs`, gives global shapes (tuples);
    needed when a result is cut unevenly: without it the local size times the axis sizes is taken, and an
    unevenly cut argument makes the call raise ValueError. Differentiable by autograd and torch.func, around
    it or inside `fn`; jvp, vmap and torch.compile inside only. Communicates only what moving an argument
    takes, and in the backward one all-reduce per tensor argument and axis of more than 1 that does not cut
    it. Raises ValueError, before communicating, for arguments that are no DTensors of this mesh and for specs
    that do not fit.
    """

    def mapped(*args: Any) -> Any:
        if not isinstance(in_specs, tuple) or len(in_specs) != len(args):
            raise ValueError(
                f"in_specs={in_specs} must be a tuple with one entry per argument, got {len(args)} arguments."
            )
        specs = _spread(in_specs, args, "in_specs")
        leaves, tree = pytree.tree_flatten(args)
        uneven = [s for x, s in zip(leaves, specs, strict=True) if _check_argument(x, s, mesh)]
        cut = [s for s in pytree.tree_leaves(out_specs) if isinstance(s, P) and any(s.dims)]
        if uneven and cut and out_shapes is None:
            raise ValueError(
                f"out_shapes=None must mean even shards, got an argument placed {uneven[0]} that is cut "
                f"unevenly. Pass out_shapes with the global shapes."
            )
        local = [_enter(x, s, mesh) for x, s in zip(leaves, specs, strict=True)]
        out = fn(*pytree.tree_unflatten(local, tree))
        out_leaves, out_tree = pytree.tree_flatten(out)
        specs = _spread(out_specs, out, "out_specs")
        shapes = _spread(out_shapes, out, "out_shapes")
        wrapped = [_leave(x, s, mesh, n) for x, s, n in zip(out_leaves, specs, shapes, strict=True)]
        return pytree.tree_unflatten(wrapped, out_tree)

    return mapped


def _is_entry(x: Any) -> bool:
    return x is None or isinstance(x, P) or (isinstance(x, tuple) and all(isinstance(n, int) for n in x))


def _spread(entries: Any, tree: Any, name: str) -> list[Any]:
    """One entry per leaf of `tree`: an entry stands for every leaf below its place."""
    if _is_entry(entries):
        return [entries] * len(pytree.tree_leaves(tree))
    flat, spec = pytree.tree_flatten(entries, is_leaf=_is_entry)
    try:
        parts = spec.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(f"{name}={entries} must be a prefix of the pytree it describes: {error}") from error
    return [e for entry, part in zip(flat, parts, strict=True) for e in _spread(entry, part, name)]


def _check_argument(x: Any, spec: Any, mesh: DeviceMesh) -> bool:
    """Whether the placement cuts x unevenly; ValueError when x cannot enter."""
    if not isinstance(x, Tensor):
        return False
    inner = unwrapped(x)
    if not isinstance(inner, DTensor):
        raise ValueError(
            f"arguments of a shard_map must be DTensors, got a plain tensor of {tuple(x.shape)}. "
            f"Use distribute_tensor, or close over the value."
        )
    if inner.device_mesh != mesh:
        raise ValueError(
            f"arguments of a shard_map must live on its mesh {mesh}, got {inner.device_mesh}. "
            f"Build both with the same mesh."
        )
    if not isinstance(spec, P):
        raise ValueError(
            f"in_specs must give a P for a tensor of {tuple(x.shape)}, got {spec}. Name its axes."
        )
    sizes = check_spec(spec, mesh, x.dim(), "in_specs")
    placements_of(spec, mesh)
    spec_of(x)
    shape = tuple(x.shape)
    first, last = (
        local_shape(spec, shape, mesh, {a: (k - 1) * end for a, k in sizes.items()}) for end in (0, 1)
    )
    return first != last


def _enter(x: Any, spec: P, mesh: DeviceMesh) -> Any:
    if not isinstance(x, Tensor):
        return x
    if spec_of(x) != spec:
        x = redistribute(x, spec)
    return _Enter.apply(x, spec, mesh)  # type: ignore[no-untyped-call]


def _leave(x: Any, spec: Any, mesh: DeviceMesh, shape: tuple[int, ...] | None) -> Any:
    if not isinstance(x, Tensor):
        return x
    if not isinstance(spec, P):
        raise ValueError(
            f"out_specs must give a P for a tensor of {tuple(x.shape)}, got {spec}. Name its axes."
        )
    sizes = check_spec(spec, mesh, x.dim(), "out_specs")
    if shape is None:
        shape = tuple(x.shape)
        for axis in (a for axes in spec.dims for a in axes):
            dim = next(d for d, axes in enumerate(spec.dims) if axis in axes)
            shape = (*shape[:dim], shape[dim] * sizes[axis], *shape[dim + 1 :])
    elif local_shape(spec, tuple(shape), mesh) != tuple(x.shape):
        raise ValueError(
            f"out_shapes={tuple(shape)} must match the local result {tuple(x.shape)} placed {spec}. "
            f"Give the global shape."
        )
    return _Leave.apply(x, spec, mesh, tuple(shape))  # type: ignore[no-untyped-call]


def _wrap(local: Tensor, spec: P, mesh: DeviceMesh, shape: tuple[int, ...]) -> DTensor:
    placements = placements_of(spec, mesh)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=global_stride(shape)
    )


class _Enter(torch.autograd.Function):
    """DTensor -> its local shard. Backward: sum the copies' contributions, wrap."""

    @staticmethod
    def forward(x: DTensor, spec: P, mesh: DeviceMesh) -> Tensor:
        return x.to_local().clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.spec, ctx.mesh = inputs
        ctx.shape = tuple(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        spec = ctx.spec.reduced()
        grad = redistribute(grads[0], dual(ctx.spec, ctx.mesh), spec, ctx.mesh, shape=ctx.shape)
        return _Leave.apply(grad, spec, ctx.mesh, ctx.shape), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _enter(tangents[0], ctx.spec, ctx.mesh)  # a tangent may be placed in another way

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        raise NotImplementedError(NO_VMAP)


class _Leave(torch.autograd.Function):
    """Local shard -> DTensor. Backward: the DTensor gradient becomes this rank's contribution."""

    @staticmethod
    def forward(x: Tensor, spec: P, mesh: DeviceMesh, shape: tuple[int, ...]) -> DTensor:
        return _wrap(x.clone(), spec, mesh, shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.spec, ctx.mesh, ctx.shape = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        src = spec_of(grads[0])
        local = _Enter.apply(grads[0], src, ctx.mesh)  # type: ignore[no-untyped-call]
        local = redistribute(local, src, dual(ctx.spec, ctx.mesh), ctx.mesh, shape=ctx.shape)
        return local, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Leave.apply(tangents[0], ctx.spec, ctx.mesh, ctx.shape)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        raise NotImplementedError(NO_VMAP)
