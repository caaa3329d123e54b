"""Moves inside torch.compile, one graph: values and gradients equal those of eager, which equal dense ones.

cases D61, P10, P12, P13, P14, P20. The problems are those of test_transforms.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, jvp, vjp, vmap

from tests.mesh.cases import assert_stands_for, dense, mesh_of, shard
from tests.mesh.test_dtensor import assert_is, wrap
from tests.mesh.test_transforms import MOVES, Problem
from tests.pool import Pool
from usp.mesh import P, dual, redistribute, shard_map

Compiled = Callable[..., Tensor]


def compiled(fn: Callable[..., object], backend: object = "aot_eager", **options: object) -> Compiled:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend=backend, **options)  # type: ignore[call-overload,no-any-return]


def plain_autograd(name: str, backend: str) -> None:
    p = Problem(name)
    if p.out:
        return
    fn = compiled(p.move, backend)
    leaf = p.x.clone().requires_grad_()
    out = fn(leaf)
    assert_stands_for(out, p.dst, p.mesh, p.X, "compiled value")
    p.assert_gradient(torch.autograd.grad(out, leaf, p.c)[0], p.C, "compiled transpose")
    loss = compiled(p.loss, backend)
    p.assert_gradient(torch.autograd.grad(loss(leaf), leaf)[0], 3 * p.C * p.X**2, "compiled gradient")


def gradient_of_own_input(name: str, backend: str) -> None:
    """The differentiated argument itself enters the Function: torch 2.13 by itself answers zero."""
    p = Problem(name)
    if p.out:
        return
    linear = compiled(grad(lambda x: (p.c * p.move(x)).sum()), backend)
    p.assert_gradient(linear(p.x), p.C, "compile(grad(f))")
    p.assert_gradient(compiled(grad(p.loss), backend)(p.x), 3 * p.C * p.X**2, "compile(grad(f)), cubic")
    pull = compiled(lambda x, w: vjp(p.move, x)[1](w)[0], backend)
    p.assert_gradient(pull(p.x, p.c), p.C, "compile(vjp)")


@pytest.mark.parametrize("name", ["seq to heads", "gather", "slice", "heads to seq, 3 ranks"])
@pytest.mark.parametrize("check", [plain_autograd, gradient_of_own_input], ids=lambda f: f.__name__)
def test_equal_to_dense(check: Callable[[str, str], None], name: str, ranks: Pool) -> None:
    assert name in MOVES
    ranks.run(check, name, "aot_eager")


def test_with_inductor(ranks: Pool) -> None:
    ranks.run(plain_autograd, "seq to heads on 4", "inductor")
    ranks.run(gradient_of_own_input, "seq to heads on 4", "inductor")


def dynamic_length() -> None:
    """case P14: S varies, no recompilation, right every time."""
    mesh = mesh_of((1, 2, 2))
    src, dst = P("dp", ("ring", "ulysses"), None), P("dp", "ring", "ulysses")

    def loss(x: Tensor, c: Tensor) -> Tensor:
        return (c * redistribute(x, src, dst, mesh) ** 2).sum()

    counter = CompileCounterWithBackend("aot_eager")
    fn = compiled(loss, counter, dynamic=True)
    for length in (8, 12, 36):
        X, C = dense((5, length, 14), seed=1), dense((5, length, 14), seed=2)  # no two local sizes equal
        x, c = shard(X, src, mesh).requires_grad_(), shard(C, dual(dst, mesh), mesh)
        (got,) = torch.autograd.grad(fn(x, c), x)
        assert_stands_for(got, dual(src, mesh), mesh, 2 * C * X, f"S={length}")
    assert counter.frame_count == 1, f"compiled {counter.frame_count} times"


def nothing_stale() -> None:
    """One compiled function, other placements, shapes and meshes: nothing stays constant that was not."""
    fn = compiled(lambda x, src, dst, mesh, shape: 1 * redistribute(x, src, dst, mesh, shape=shape))
    ring, dp, seq, heads = mesh_of((1, 2, 2)), mesh_of((2, 1, 2)), P(None, "ulysses"), P("ulysses", None)
    for src, dst, mesh, shape in (
        (seq, heads, ring, (5, 7)),
        (seq, P(None, None), ring, (5, 7)),  # another dst
        (P(None, "ring"), P(None, None), ring, (5, 7)),  # another src, of the same local shape
        (seq, heads, dp, (5, 7)),  # another mesh
        (seq, heads, ring, (5, 8)),  # another global shape, the same local one on rank 0
        (seq, heads, ring, (5, 7)),
    ):
        X = dense(shape)
        got = fn(shard(X, src, mesh), src, dst, mesh, shape)
        assert_stands_for(got, dst, mesh, X, f"{src} -> {dst} of {shape} on {mesh}")


def refusals() -> None:
    mesh = mesh_of((1, 1, 4))
    fn = compiled(lambda x: redistribute(x, P("ulysses", None), P(None, "ulysses"), mesh))
    with pytest.raises(Exception, match="Pass shape= with the global shape"):
        fn(torch.zeros(2, 5))


def other_transforms() -> None:
    """cases P20, P22: torch.compile around vmap or jvp of a move would be wrong in silence; it is refused."""
    p = Problem("seq to heads on 4")
    pair = torch.stack([p.x, p.v])
    for fn, args in (
        (vmap(p.move), (pair,)),
        (vmap(grad(p.loss)), (pair,)),
        (lambda x, v: jvp(p.move, (x,), (v,))[1], (p.x, p.v)),
    ):
        with pytest.raises(Exception, match="must be under reverse mode alone"):
            compiled(fn)(*args)
        assert torch.isfinite(fn(*args)).all()  # uncompiled they work


def dtensor_arguments() -> None:
    """Around torch.func.grad of DTensors torch.compile raises or is right; inside shard_map it works."""
    mesh, shape = mesh_of((1, 2, 2)), (2, 7, 5)
    src, dst = P("dp", ("ring", "ulysses"), None), P("dp", "ring", "ulysses")
    X, C = dense(shape, seed=1), dense(shape, seed=2)
    x, c = wrap(X, src, mesh), wrap(C, dst, mesh)
    try:
        got = compiled(grad(lambda x: (redistribute(x, dst) * c).sum()))(x)
    except Unsupported:
        pass
    else:
        assert_is(got, src, C)

    def block(x: Tensor, c: Tensor) -> Tensor:
        return (c * redistribute(x, src, dst, mesh, shape=shape) ** 2).sum()

    everywhere = P(partial=("dp", "ring", "ulysses"))
    mapped = shard_map(compiled(block), mesh, (src, dst), everywhere)
    leaf = x.clone().requires_grad_()
    assert_is(torch.autograd.grad(mapped(leaf, c), leaf)[0], src, 2 * C * X)


@pytest.mark.parametrize(
    "check",
    [dynamic_length, nothing_stale, refusals, other_transforms, dtensor_arguments],
    ids=lambda f: f.__name__,
)
def test_recompilation(check: Callable[[], None], ranks: Pool) -> None:
    ranks.run(check)
