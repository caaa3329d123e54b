"""Moves of DTensors: equal to DTensor's own, under torch.func, compiled; never silently wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.func import grad, jvp, vjp, vmap

from tests.mesh.cases import SPECS_1D, Sizes, dense, mesh_of, outside, pairs, shard, specs_2d
from tests.pool import Pool
from usp.mesh import P, dual, placements_of, redistribute, spec_from
from usp.mesh.devices import AXES
from usp.mesh.dtensor import global_stride
from usp.mesh.redistribute import COMPILES_PENDING_SUMS

ORDERED = tuple(s for s in specs_2d("ring", "ulysses") if ("ulysses", "ring") not in s.dims)
SEQ, HEADS = P("dp", ("ring", "ulysses"), None), P("dp", "ring", "ulysses")


def wrap(x: Tensor, spec: P, mesh: DeviceMesh) -> DTensor:
    """The DTensor of a global x, rank-coded where a sum is pending."""
    kwargs: dict[str, Any] = {"shape": x.shape, "stride": global_stride(tuple(x.shape)), "run_check": False}
    return DTensor.from_local(shard(x, spec, mesh), mesh, placements_of(spec, mesh), **kwargs)


def assert_is(got: Tensor, spec: P, want: Tensor, note: str = "") -> None:
    assert isinstance(got, DTensor), note
    assert spec_from(got.placements, got.device_mesh, got.dim()) == spec, f"{note}: placed {got.placements}"
    assert got.shape == want.shape, note
    assert torch.equal(got.full_tensor(), want), note


def like_dtensor(sizes: Sizes, specs: tuple[P, ...], shape: tuple[int, ...]) -> None:
    """Local values equal those of DTensor's own redistribute and the dense ones; gradients likewise."""
    mesh, X, W = mesh_of(sizes), dense(shape), dense(shape, seed=1)
    if outside(mesh):
        return
    for src, dst in pairs(specs):
        note = f"{src} -> {dst} of {shape}"
        x = wrap(X, src, mesh)
        x.requires_grad_()
        ours = redistribute(x, dst)
        assert_is(ours, dst, X, note)
        if not dst.partial or src == dst:  # DTensor knows no way from a shard to a pending sum
            theirs = x.redistribute(mesh, placements_of(dst, mesh))
            assert isinstance(ours, DTensor)
            assert torch.equal(ours.to_local(), theirs.to_local()), note
        w = distribute_tensor(W, mesh, placements_of(dst.reduced(), mesh))
        (got,) = torch.autograd.grad(ours, x, w)
        assert_is(got, src.reduced(), W, f"gradient of {note}")


@pytest.mark.parametrize("shape", [(4, 8, 12), (3, 7, 5), (1, 5, 9)], ids=str)
def test_equal_to_dtensors_own(shape: tuple[int, ...], ranks: Pool) -> None:
    ranks.run(like_dtensor, (1, 2, 2), ORDERED, shape)
    ranks.run(like_dtensor, (1, 1, 4), SPECS_1D, shape)
    ranks.run(like_dtensor, (1, 1, 3), SPECS_1D, shape)


def round_trip(sizes: Sizes) -> None:
    """A spec becomes placements and comes back, without loss."""
    mesh = mesh_of(sizes)
    for spec in (*specs_2d("dp", "ulysses"), *specs_2d("ring", "ulysses"), HEADS, P(AXES)):
        if any(list(axes) != sorted(axes) for axes in spec.dims):  # mesh order is that of letters
            with pytest.raises(ValueError, match="must name the axes of one dimension in mesh order"):
                placements_of(spec, mesh)
        else:
            assert spec_from(tuple(placements_of(spec, mesh)), mesh, len(spec)) == spec
    assert placements_of(P("dp", ("ring", "ulysses"), None), mesh) == [Shard(0), Shard(1), Shard(1)]
    assert placements_of(P(None, "ring", partial="ulysses"), mesh) == [Replicate(), Shard(1), Partial()]
    assert spec_from((Replicate(), Shard(-1), Replicate()), mesh, 3) == P(None, None, "ring")
    for bad in (_StridedShard(0, split_factor=2), Partial("max"), Partial("avg")):
        with pytest.raises(ValueError, match="on axis 'ring' must be Shard, Replicate or a pending sum"):
            spec_from((Replicate(), bad, Replicate()), mesh, 2)


def transforms(sizes: Sizes) -> None:
    """grad and vjp of DTensor arguments, nested; the gradient is placed as the argument is."""
    mesh, shape = mesh_of(sizes), (2, 7, 5)
    X, C, V = (dense(shape, seed=seed) for seed in (1, 2, 3))
    for src, dst in [(SEQ, HEADS), (HEADS, SEQ), (SEQ, P("dp", None, None)), (P("dp", None, None), HEADS)]:
        x, c, v = wrap(X, src, mesh), wrap(C, dst, mesh), wrap(V, src, mesh)

        def loss(x: Tensor) -> Tensor:
            return (c * redistribute(x, dst) ** 2).sum()  # noqa: B023

        note = f"{src} -> {dst}"
        assert_is(grad(loss)(x), src, 2 * C * X, note)
        value, pull = vjp(loss, x)[:2]
        assert_is(pull(torch.ones_like(value))[0], src, 2 * C * X, note)
        second = grad(lambda x: (grad(loss)(x) * v).sum())(x)  # noqa: B023
        assert_is(second, src, 2 * C * V, f"second order, {note}")
        leaf = wrap(X, src, mesh).requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        assert_is(torch.autograd.grad((first * v).sum(), leaf)[0], src, 2 * C * V, f"double backward, {note}")
        for tangent in (v, wrap(V, P("dp", None, None), mesh)):  # the second placed in another way
            try:
                out = jvp(lambda x: redistribute(x, dst) * 3, (x,), (tangent,))  # noqa: B023
            except NotImplementedError:
                continue  # torch 2.13 refuses any forward-mode DTensor before it reaches us: not silent (P22)
            assert_is(out[0], dst, 3 * X, f"jvp value, {note}")
            assert_is(out[1], dst, 3 * V, f"jvp tangent, {note}")


def refused(sizes: Sizes) -> None:
    mesh = mesh_of(sizes)
    x = wrap(dense((2, 8, 4)), SEQ, mesh)
    with pytest.raises(NotImplementedError, match=r"vmap must not batch a DTensor.*Use shard_map"):
        vmap(lambda x: redistribute(x, P(("ring", "ulysses"), None)), in_dims=0)(x)
    with pytest.raises(NotImplementedError, match="vmap must not batch a DTensor"):
        vmap(lambda x: redistribute(x, P("ring", "ulysses")), in_dims=1)(x)
    for call, message in [
        (lambda: redistribute(x, HEADS, SEQ), "src=.* must be the placement of the DTensor, got"),
        (lambda: redistribute(x, SEQ, HEADS, mesh), "x must be a local shard, got a DTensor"),
        (lambda: redistribute(x, HEADS, shape=(2, 8, 4)), "must not be given, a DTensor has its own"),
        (lambda: redistribute(x, P(None, "ring")), r"dst=P\(None, 'ring'\) must name 3 dimensions, got 2"),
        (lambda: redistribute(x, P(None, "tp", None)), "must use axes of the mesh"),
        (lambda: redistribute(x, P(None, ("ulysses", "ring"), None)), "in mesh order"),
        (lambda: redistribute(x.to_local(), HEADS), "x must be a DTensor when no mesh is given"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert redistribute(x, SEQ) is x
    assert_is(redistribute(x, SEQ, HEADS), HEADS, dense((2, 8, 4)))


def compiled(sizes: Sizes) -> None:
    """One graph around a DTensor move, plain autograd. case D62, P13, P21."""
    mesh, shape = mesh_of(sizes), (2, 7, 5)
    X, W = dense(shape), dense(shape, seed=1)
    for src, dst in [
        (SEQ, HEADS),
        (SEQ, P("dp", None, None)),
        (P("dp", None, None), SEQ),
        (P("dp", "ring", None, partial="ulysses"), SEQ),
        (P("dp", "ring", None, partial="ulysses"), P("dp", None, None)),
    ]:
        torch._dynamo.reset()
        fn = torch.compile(lambda x, d: redistribute(x, d) * 2, fullgraph=True, backend="aot_eager")
        x = wrap(X, src, mesh).requires_grad_()
        if src.partial and not COMPILES_PENDING_SUMS:
            with pytest.raises(Exception, match="must have no pending sum inside"):
                fn(x, dst)
            continue
        out = fn(x, dst)
        assert_is(out, dst, 2 * X, f"compiled {src} -> {dst}")
        (got,) = torch.autograd.grad(out, x, distribute_tensor(W, mesh, placements_of(dst, mesh)))
        assert_is(got, src.reduced(), 2 * W, f"compiled gradient of {src} -> {dst}")


def between_worlds(sizes: Sizes) -> None:
    """case P8: there and back is the identity for values and gradients, pending sums included."""
    mesh, shape, whole = mesh_of(sizes), (3, 7, 5), P(None, None, None)
    X, W = dense(shape), dense(shape, seed=1)
    for spec in ORDERED:
        x = wrap(X, spec, mesh).requires_grad_()
        there = redistribute(redistribute(x, P(None, None, "ring")), spec.reduced())
        w = distribute_tensor(W, mesh, placements_of(spec.reduced(), mesh))
        assert_is(torch.autograd.grad(there, x, w)[0], spec.reduced(), W, f"{spec}")
        local = shard(X, spec, mesh).requires_grad_()
        gathered = redistribute(local, spec, whole, mesh, shape=shape)
        back = redistribute(gathered, whole, spec, mesh, shape=shape)
        w = shard(W, dual(spec, mesh), mesh)
        (got,) = torch.autograd.grad(back, local, w)
        full = redistribute(got, dual(spec, mesh), whole, mesh, shape=shape)
        assert torch.equal(full, W), f"{spec}"


@pytest.mark.parametrize(
    "check", [round_trip, transforms, refused, compiled, between_worlds], ids=lambda f: f.__name__
)
def test_dtensor(check: Callable[[Sizes], None], ranks: Pool) -> None:
    ranks.run(check, (1, 2, 2))
