"""Moves inside torch.func and under autograd, to second order: equal to the same on one dense tensor.

The objective is the sum over ranks: rank r adds (c_r * move(x) ** 3).sum() with its own coefficients c_r,
which sum to C over the copies of an element. Densely f(X) = (C * X ** 3).sum(), with gradient 3 C X^2 and
Hessian product 6 C X V. All numbers are whole, so every comparison is exact.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from tests.mesh.cases import Sizes, assert_stands_for, dense, mesh_of, outside, shard
from tests.pool import Pool
from usp.mesh import P, dual, exchange, redistribute

Moved = Callable[[Tensor], Tensor]

# name: mesh, from, to, global shape (uneven). Nothing partial here: a cube of a summand means nothing.
MOVES: dict[str, tuple[Sizes, P, P, tuple[int, ...]]] = {
    "seq to heads": ((1, 2, 2), P(None, ("ring", "ulysses"), None), P(None, "ring", "ulysses"), (2, 7, 3)),
    "seq to heads on 4": ((1, 1, 4), P("dp", "ulysses", None), P("dp", None, "ulysses"), (2, 6, 5)),
    "heads to seq, 3 ranks": ((1, 1, 3), P(None, None, "ulysses"), P(None, "ulysses", None), (2, 7, 5)),
    "gather": ((2, 1, 2), P("dp", "ulysses", None), P("dp", None, None), (3, 5, 2)),
    "gather both": ((2, 1, 2), P(None, ("dp", "ulysses"), None), P(None, None, None), (2, 7, 3)),
    "slice": ((1, 2, 2), P("ring", None, None), P("ring", "ulysses", None), (3, 5, 2)),
    "two moves": ((1, 2, 2), P("ring", "ulysses", None), P(None, "ring", "ulysses"), (3, 5, 7)),
}


class Problem:
    """One move, with this rank's x, tangent v and coefficients, and the dense tensors they stand for."""

    def __init__(self, name: str) -> None:
        sizes, self.src, self.dst, self.shape = MOVES[name]
        self.mesh = mesh_of(sizes)
        self.out = outside(self.mesh)
        if self.out:
            return
        self.X, self.V, self.C = (dense(self.shape, seed=seed) for seed in (1, 2, 3))
        self.x, self.v = (shard(t, self.src, self.mesh) for t in (self.X, self.V))
        self.c = shard(self.C, dual(self.dst, self.mesh), self.mesh)

    def move(self, x: Tensor) -> Tensor:
        return redistribute(x, self.src, self.dst, self.mesh, shape=self.shape)

    def loss(self, x: Tensor) -> Tensor:
        return (self.c * self.move(x) ** 3).sum()

    def assert_gradient(self, got: Tensor, want: Tensor, note: str) -> None:
        """`got` is this rank's contribution to a gradient with respect to x."""
        assert_stands_for(got, dual(self.src, self.mesh), self.mesh, want, note)


def first_order(name: str) -> None:
    p = Problem(name)
    if p.out:
        return
    want = 3 * p.C * p.X**2
    p.assert_gradient(grad(p.loss)(p.x), want, "grad")
    value, pull = vjp(p.loss, p.x)[:2]
    p.assert_gradient(pull(torch.ones_like(value))[0], want, "vjp")
    leaf = p.x.clone().requires_grad_()
    p.loss(leaf).backward()
    assert leaf.grad is not None
    p.assert_gradient(leaf.grad, want, "backward")
    out, tangent = jvp(lambda x: p.move(x) ** 3, (p.x,), (p.v,))[:2]
    assert_stands_for(out, p.dst, p.mesh, p.X**3, "jvp value")
    assert_stands_for(tangent, p.dst, p.mesh, 3 * p.X**2 * p.V, "jvp tangent")  # case P22
    with forward_ad.dual_level():
        pair = forward_ad.unpack_dual(p.move(forward_ad.make_dual(p.x, p.v)) ** 3)
        assert pair.tangent is not None
        assert_stands_for(pair.tangent, p.dst, p.mesh, 3 * p.X**2 * p.V, "forward_ad")
    step = 2.0**-12  # finite difference, central: exact for a cube up to V^3 step^2
    difference = (p.move(p.x + step * p.v) ** 3 - p.move(p.x - step * p.v) ** 3) / (2 * step)
    assert (difference - tangent).abs().max() < 1e-3 if difference.numel() else True


def second_order(name: str) -> None:
    p = Problem(name)
    if p.out:
        return
    hvp = 6 * p.C * p.X * p.V
    p.assert_gradient(grad(lambda x: (grad(p.loss)(x) * p.v).sum())(p.x), hvp, "grad of grad")
    p.assert_gradient(jvp(grad(p.loss), (p.x,), (p.v,))[1], hvp, "jvp of grad")
    p.assert_gradient(grad(lambda x: jvp(p.loss, (x,), (p.v,))[1])(p.x), hvp, "grad of jvp")
    p.assert_gradient(vjp(grad(p.loss), p.x)[1](p.v)[0], hvp, "vjp of grad")
    leaf = p.x.clone().requires_grad_()
    (first,) = torch.autograd.grad(p.loss(leaf), leaf, create_graph=True)
    p.assert_gradient(torch.autograd.grad(first, leaf, p.v)[0], hvp, "double backward")
    third = grad(lambda x: (grad(lambda y: (grad(p.loss)(y) * p.v).sum())(x) * p.v).sum())(p.x)
    p.assert_gradient(third, 6 * p.C * p.V**2, "third order")


def batched(name: str) -> None:
    """case P22: vmap equals the loop over its members."""
    p = Problem(name)
    if p.out:
        return
    xs = torch.stack([p.x, p.v, p.x - 2 * p.v])
    want = torch.stack([p.move(x) for x in xs])
    for dim in (0, 1, -1):
        assert torch.equal(vmap(p.move, in_dims=dim)(xs.movedim(0, dim)), want), f"in_dims={dim}"
    assert torch.equal(vmap(p.move, out_dims=2)(xs), want.movedim(0, 2))
    assert torch.equal(vmap(vmap(p.move))(torch.stack([xs, -xs])), torch.stack([want, -want]))
    grads = torch.stack([grad(p.loss)(x) for x in xs])
    for dim in (0, 1):
        assert torch.equal(vmap(grad(p.loss), in_dims=dim)(xs.movedim(0, dim)), grads), f"grad, in_dims={dim}"
    summed = grad(lambda x: vmap(p.loss)(x).sum())(xs)
    assert torch.equal(summed, grads), "grad of vmap"
    assert torch.equal(vmap(lambda x, v: jvp(p.loss, (x,), (v,))[1])(xs, xs), 3 * vmap(p.loss)(xs))
    assert torch.equal(vmap(p.move, in_dims=(0,), chunk_size=2)(xs), want)
    other = vmap(lambda x, k: p.move(x) * k, in_dims=(None, 0))(p.x, torch.arange(3.0))  # x not batched
    assert torch.equal(other[2], 2 * p.move(p.x))


def in_modules(name: str) -> None:
    """functional_call, and a parameter that reaches the move through other operations."""
    p = Problem(name)
    if p.out:
        return

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((), 2.0, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (p.c * p.move(x * self.weight) ** 3).sum()

    model = Scale()
    weights = {"weight": model.weight.detach()}
    by_name, by_x = grad(lambda w, x: functional_call(model, w, (x,)), argnums=(0, 1))(weights, p.x)
    p.assert_gradient(by_x, 24 * p.C * p.X**2, "x")
    everywhere = P(partial=tuple(p.mesh.mesh_dim_names or ()))
    assert_stands_for(by_name["weight"], everywhere, p.mesh, (12 * p.C * p.X**3).sum(), "weight")


@pytest.mark.parametrize("check", [first_order, second_order, batched, in_modules], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", MOVES)
def test_equal_to_dense(name: str, check: Callable[[str], None], ranks: Pool) -> None:
    ranks.run(check, name)


def whole_derivatives() -> None:
    """jacrev and hessian, which are vmaps over the transpose, on a move that stays within one dimension."""
    mesh = mesh_of((1, 1, 2))
    if outside(mesh):
        return
    src, dst = P("ulysses", None), P(None, "ulysses")
    x, c = shard(dense((4, 2)), src, mesh), shard(dense((4, 2), seed=3), dst, mesh)

    def loss(x: Tensor) -> Tensor:
        return (c * redistribute(x, src, dst, mesh) ** 3).sum()

    full = hessian(loss)(x).reshape(4, 4)
    for column, unit in zip(full.T, torch.eye(4, dtype=x.dtype), strict=True):
        assert torch.equal(column, jvp(grad(loss), (x,), (unit.view(2, 2),))[1].flatten())
    rows = jacrev(lambda x: redistribute(x, src, dst, mesh))(x)
    assert rows.shape == (4, 1, 2, 2)


def exchanges() -> None:
    """`exchange`: pieces of any length, also none; all transforms."""
    mesh = mesh_of((1, 1, 4))
    me = mesh.get_coordinate()[2]  # type: ignore[index]
    lengths = torch.tensor([[3, 0, 2, 1], [1, 1, 4, 0], [0, 2, 1, 5], [2, 3, 0, 1]])  # from row to column
    send, receive = tuple(lengths[me].tolist()), tuple(lengths[:, me].tolist())
    pieces = [
        [dense((int(n),)) + 100 * i + 10 * j for j, n in enumerate(row)] for i, row in enumerate(lengths)
    ]
    x, want = torch.cat(pieces[me]), torch.cat([row[me] for row in pieces])

    def move(x: Tensor) -> Tensor:
        return exchange(x, mesh, "ulysses", send=send, receive=receive)

    assert torch.equal(move(x), want)
    assert torch.equal(vjp(move, x)[1](want)[0], x)
    assert torch.equal(jvp(move, (x,), (2 * x,))[1], 2 * want)
    assert torch.equal(vmap(move, in_dims=1)(torch.stack([x, 3 * x], 1)), torch.stack([want, 3 * want]))
    many = torch.stack([x, 3 * x, -x, x + 1]).view(2, 2, -1)
    assert torch.equal(vmap(vmap(move))(many)[1, 0], -want)
    for bad in ({"send": send[:3]}, {"receive": (*receive, 1)}, {"send": (*send[:3], 9)}):
        if me == 3:
            with pytest.raises(ValueError, match=r"one size per rank|sizes that add up"):
                exchange(x, mesh, "ulysses", send=bad.get("send", send), receive=bad.get("receive", receive))
    if me == 0:
        with pytest.raises(ValueError, match="must be flat"):
            exchange(x[None], mesh, "ulysses", send=send, receive=receive)


def test_jacobians_and_exchange(ranks: Pool) -> None:
    ranks.run(whole_derivatives)
    ranks.run(exchanges)
