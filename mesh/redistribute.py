"""`redistribute`: carry out the plan between two placements, differentiably, on local shards or DTensors."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from usp.mesh.constants import constant
from usp.mesh.devices import MeshLike, axis_sizes, coordinates
from usp.mesh.dtensor import NO_VMAP, global_stride, placements_of, spec_of, unwrapped
from usp.mesh.linear import apply_linear
from usp.mesh.move import Move
from usp.mesh.spec import Axes, P, check_spec, chunk, local_shape

COMPILES_PENDING_SUMS = TorchVersion(torch.__version__) >= "2.13"
"""Seen on 2.11: the compiled gradient of a DTensor that holds a pending sum is wrong, without a word."""


def redistribute(
    x: Tensor,
    src: P,
    dst: P | None = None,
    mesh: MeshLike | None = None,
    *,
    shape: tuple[int, ...] | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """Move `x` from placement `src` to `dst`: local shard in, local shard out (or DTensor in, DTensor out).

    `redistribute(local, src, dst, mesh)`; `redistribute(dtensor, dst)`. Communicates exactly the steps of
    `plan(src, dst, ...)`, and in the backward those of the dual move. Works under autograd, torch.func (grad,
    vjp, jvp, vmap, functional_call, nested) and inside torch.compile. Over DTensors jvp and vmap raise; use
    them inside shard_map.

    `shape` is the global shape, needed when a sharded dimension is not divisible by its axes: without it
    every rank must hold as much as this one, which none can check alone. Sums are taken in float32 or wider
    unless `reduce_dtype` says otherwise. Gradients of a replicated local value are per-rank contributions, to
    be summed (`dual`); those of DTensors carry their own placement. Raises ValueError when a spec does not
    fit the mesh or the tensor, before communicating.
    """
    if reduce_dtype is not None and not reduce_dtype.is_floating_point:
        raise ValueError(f"reduce_dtype={reduce_dtype} must be floating point. Leave it out to sum integers.")
    if x.is_complex():
        raise ValueError(f"dtype={x.dtype} must be real. Redistribute torch.view_as_real(x).")
    if mesh is None:
        want, given = (src, None) if dst is None else (dst, src)
        if shape is not None:
            raise ValueError(f"shape={tuple(shape)} must not be given, a DTensor has its own. Leave it out.")
        return _redistribute_dtensor(x, want, given, reduce_dtype)
    if dst is None:
        raise ValueError("dst=None must be a placement, got mesh. Call redistribute(x, src, dst, mesh).")
    if isinstance(unwrapped(x), DTensor):
        raise ValueError("x must be a local shard, got a DTensor and mesh. Call redistribute(x, dst).")
    check_spec(src, mesh, x.dim(), "src")
    check_spec(dst, mesh, x.dim(), "dst")
    if shape is not None:
        shape = tuple(shape)
        _check_shape(tuple(x.shape), src, mesh, shape)
    if src == dst:
        return x
    return apply_linear(x, Move(src, dst, mesh, shape, reduce_dtype))


def _check_shape(local: tuple[int, ...], src: P, mesh: MeshLike, shape: tuple[int, ...]) -> None:
    if len(shape) != len(local):
        raise ValueError(f"shape={shape} must have {len(local)} dimensions, like x. Pass the global shape.")
    own = _own_shape(src, mesh, shape)
    if own != local:
        raise ValueError(
            f"shape={shape} must be global: placed {src} this rank holds {own}, got x of {local}. "
            f"Pass the global shape, or the src that x has."
        )


def _own_shape(src: P, mesh: MeshLike, shape: tuple[int, ...]) -> tuple[int, ...]:
    """`local_shape`, in arithmetic that torch.compile can follow when sizes are symbols."""
    if not isinstance(mesh, DeviceMesh):
        return local_shape(src, shape, mesh)
    own = []
    for n, cuts in zip(shape, _cuts(src.dims, mesh), strict=True):
        for parts, index in cuts:
            n = chunk(n, parts, index)[1]
        own.append(n)
    return tuple(own)


@constant
def _cuts(dims: tuple[Axes, ...], mesh: DeviceMesh) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per dimension, for each axis that cuts it: number of ranks and own index."""
    sizes, at = axis_sizes(mesh), coordinates(mesh)
    return tuple(tuple((sizes[a], at[a]) for a in axes) for axes in dims)


def _redistribute_dtensor(x: Tensor, dst: P, given: P | None, reduce_dtype: torch.dtype | None) -> Tensor:
    inner = unwrapped(x)
    if not isinstance(inner, DTensor):
        raise ValueError("x must be a DTensor when no mesh is given. Call redistribute(x, src, dst, mesh).")
    mesh, src = inner.device_mesh, spec_of(x)
    if given is not None and given != src:
        raise ValueError(f"src={given} must be the placement of the DTensor, got {src}. Leave src out.")
    check_spec(dst, mesh, x.dim(), "dst")
    placements_of(dst, mesh)  # what DTensor cannot say is refused now
    if src == dst:
        return x
    move = Move(src, dst, mesh, tuple(x.shape), reduce_dtype, summed=True)
    if torch.compiler.is_compiling():
        if src.partial and not COMPILES_PENDING_SUMS:
            raise ValueError(
                f"src={src} must have no pending sum inside torch.compile, got torch {torch.__version__}, "
                f"which compiles its gradient wrongly. Redistribute before the compiled part, or use 2.13."
            )
        local = x.to_local(grad_placements=placements_of(src.reduced(), mesh))  # type: ignore[attr-defined]
        return _wrap(apply_linear(local, move), move)
    return cast(Tensor, _MoveDTensor.apply(x, move))  # type: ignore[no-untyped-call]


def _wrap(local: Tensor, move: Move) -> DTensor:
    assert isinstance(move.mesh, DeviceMesh)
    assert move.shape is not None
    return DTensor.from_local(
        local,
        move.mesh,
        placements_of(move.dst, move.mesh),
        run_check=False,
        shape=torch.Size(move.shape),
        stride=global_stride(move.shape),
    )


class _MoveDTensor(torch.autograd.Function):
    """Same move, DTensor to DTensor. A gradient arrives placed in its own way and leaves as `src`, summed."""

    @staticmethod
    def forward(x: DTensor, move: Move) -> DTensor:
        local = x.to_local()
        return _wrap(local.clone() if move.empty() else move.run(local), move)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.move = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _redistribute_dtensor(grads[0], ctx.move.src.reduced(), None, ctx.move.reduce_dtype), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _redistribute_dtensor(tangents[0], ctx.move.dst, None, ctx.move.reduce_dtype)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        raise NotImplementedError(NO_VMAP)
