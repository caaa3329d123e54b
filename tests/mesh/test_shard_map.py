"""`shard_map`: the same as the function of one dense tensor, differentiated around it and inside it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.func import grad, grad_and_value, jvp, vjp, vmap

from tests.comm import Comm, counted
from tests.mesh.cases import Sizes, dense, mesh_of
from tests.mesh.test_dtensor import assert_is, wrap
from tests.pool import Pool
from usp.mesh import P, redistribute, shard_map, spec_from

RU = ("ring", "ulysses")
SEQ, FLAT, WHOLE = P("dp", RU, None), P("dp", None, ("ulysses", "ring")), P(None, None)


class Weights(NamedTuple):
    up: Any
    down: Any


def model(x: Tensor, w: Weights, move: Callable[[Tensor, P, P], Tensor]) -> Tensor:
    """[B, S, N]: a map along N, a move, a map along S that no shard of S could do, a move back."""
    h = torch.tanh(x @ w.up)
    h = move(h, SEQ, FLAT)
    h = h * h.flip(1) + 0.5 * h
    h = move(h, FLAT, SEQ)
    return torch.sin(h @ w.down)


def stay(x: Tensor, src: P, dst: P) -> Tensor:
    return x


class Case:
    """x and two weights as DTensors and dense, and a loss of each kind. Sizes pairwise different."""

    def __init__(self, sizes: Sizes, shape: tuple[int, int, int]) -> None:
        self.mesh, self.shape = mesh_of(sizes), shape
        self.X = dense(shape, seed=1) / 10
        wide = 4
        self.up, self.down = dense((shape[2], wide), seed=2) / 10, dense((wide, shape[2]), seed=3) / 10
        self.x = wrap(self.X, SEQ, self.mesh)
        self.w = Weights(wrap(self.up, WHOLE, self.mesh), wrap(self.down, WHOLE, self.mesh))
        self.dense_w = Weights(self.up, self.down)
        self.inner = (*shape[:2], wide)

    def move(self, x: Tensor, src: P, dst: P) -> Tensor:
        return redistribute(x, src, dst, self.mesh, shape=self.inner)

    def forward(self) -> Callable[..., Any]:
        return shard_map(
            lambda x, w: model(x, w, self.move), self.mesh, (SEQ, WHOLE), SEQ, out_shapes=self.shape
        )

    def loss(self) -> Callable[..., Any]:
        """The loss as a pending sum over the axes that cut the tokens: one scalar outside."""
        spec = P(partial=("dp", *RU))

        def local(x: Tensor, w: Weights) -> Tensor:
            return model(x, w, self.move).square().sum()

        return shard_map(local, self.mesh, (SEQ, WHOLE), spec)

    def dense_loss(self, x: Tensor, w: Weights) -> Tensor:
        return model(x, w, stay).square().sum()


def close(got: Tensor, want: Tensor) -> None:
    """float64, sums of at most a few hundred terms in another order."""
    got = got.full_tensor() if isinstance(got, DTensor) else got
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e-13 * max(1.0, float(want.abs().max()))


def placed(got: Any, spec: P) -> bool:
    return isinstance(got, DTensor) and spec_from(got.placements, got.device_mesh, got.dim()) == spec


def around(sizes: Sizes, shape: tuple[int, int, int]) -> None:
    """grad, vjp, plain and double backward around shard_map; a replicated weight's gradient is summed."""
    c = Case(sizes, shape)
    out = c.forward()(c.x, c.w)
    assert placed(out, SEQ)
    close(out, model(c.X, c.dense_w, stay))
    want, value = grad_and_value(c.dense_loss, argnums=(0, 1))(c.X, c.dense_w)
    got, total = grad_and_value(c.loss(), argnums=(0, 1))(c.x, c.w)
    close(total, value)
    assert placed(got[0], SEQ)
    assert placed(got[1].up, WHOLE)
    for mine, dense_one in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
        close(mine, dense_one)
    value, pull = vjp(c.forward(), c.x, c.w)[:2]
    weight = wrap(dense(shape, seed=5), P("dp", None, None), c.mesh)  # a cotangent placed in another way
    back = vjp(lambda x, w: model(x, w, stay), c.X, c.dense_w)[1](dense(shape, seed=5))
    mine = pull(weight)
    close(mine[0], back[0])
    close(mine[1].up, back[1].up)
    close(mine[1].down, back[1].down)
    leaf = c.x.clone().requires_grad_()
    (first,) = torch.autograd.grad(c.loss()(leaf, c.w), leaf, create_graph=True)
    close(first, want[0])
    v, V = wrap(dense(shape, seed=6), SEQ, c.mesh), dense(shape, seed=6)
    hvp = jvp(lambda x: grad(c.dense_loss)(x, c.dense_w), (c.X,), (V,))[1]
    close(torch.autograd.grad((first * v).sum(), leaf)[0], hvp)
    close(grad(lambda x: (grad(c.loss())(x, c.w) * v).sum())(c.x), hvp)


def inside(sizes: Sizes, shape: tuple[int, int, int]) -> None:
    """A whole step inside: local gradients, the weight's still a pending sum, taken by the out_spec."""
    c = Case(sizes, shape)
    axes = ("dp", *RU)

    def step(x: Tensor, w: Weights) -> tuple[Tensor, Weights, dict[str, Tensor]]:
        def loss(x: Tensor, w: Weights) -> Tensor:
            return model(x, w, c.move).square().sum()

        (gx, gw), value = grad_and_value(loss, argnums=(0, 1))(x, w)
        hvp = jvp(lambda x: grad(loss)(x, w), (x,), (x,))[1]
        many = vmap(lambda k: grad(loss)(x * k, w))(torch.tensor([1.0, 2.0]))
        return gx, gw, {"value": value, "hvp": hvp, "many": many[1]}

    sums = {"value": P(partial=axes), "hvp": SEQ, "many": SEQ}
    outer = {"value": (), "hvp": shape, "many": shape}
    shapes = (shape, Weights(tuple(c.up.shape), tuple(c.down.shape)), outer)
    specs = (SEQ, P(None, None, partial=axes), sums)
    mapped = shard_map(step, c.mesh, (SEQ, WHOLE), specs, out_shapes=shapes)
    gx, gw, rest = mapped(c.x, c.w)
    want, value = grad_and_value(c.dense_loss, argnums=(0, 1))(c.X, c.dense_w)
    assert isinstance(gw, Weights)
    close(gx, want[0])
    close(gw.up, want[1].up)
    close(gw.down, want[1].down)
    close(rest["value"], value)
    close(rest["hvp"], jvp(lambda x: grad(c.dense_loss)(x, c.dense_w), (c.X,), (c.X,))[1])
    close(rest["many"], grad(c.dense_loss)(2 * c.X, c.dense_w))


def replicated_both_ways(sizes: Sizes, shape: tuple[int, int, int]) -> None:
    """An argument whose copies each rank uses in its own way, and a result of which all hold a copy."""
    mesh = mesh_of(sizes)
    X, rank = dense(shape), torch.distributed.get_rank()
    copies, summed, cut = (
        P(None, None, None),
        P(None, None, None, partial=("dp", *RU)),
        P("dp", None, "ulysses"),
    )
    x = wrap(X, copies, mesh)
    weighted = shard_map(lambda x: (rank + 1.0) * x, mesh, (copies,), summed)
    assert_is(weighted(x), summed, 10 * X)
    got = grad(lambda x: weighted(x).sum())(x)
    assert_is(got, copies, torch.full(shape, 10.0, dtype=X.dtype))  # 1 + 2 + 3 + 4
    same = shard_map(lambda x: 3 * x, mesh, (copies,), copies)
    assert_is(grad(lambda x: (same(x) * x).sum())(x), copies, 6 * X)  # counted once, not per copy
    y = wrap(X, P("ring", None, None), mesh)  # placed otherwise: moved first, its gradient moves back
    moved = shard_map(lambda x: 2 * x, mesh, (cut,), cut, out_shapes=shape)
    assert_is(moved(y), cut, 2 * X)
    assert placed(grad(lambda y: moved(y).sum())(y), P("ring", None, None))
    close(grad(lambda y: (moved(y) * moved(y)).sum())(y), 8 * X)


def communicates(sizes: Sizes, shape: tuple[int, int, int]) -> None:
    """Nothing but what fn does, and one all-reduce per replicated tensor in the backward."""
    c = Case(sizes, shape)
    axes = sum(size > 1 for size in c.mesh.shape)  # a collective over several axes is one per axis
    assert counted(lambda: c.forward()(c.x, c.w)) == {"all_to_all": 2 * axes}
    backward = counted(lambda: grad(c.loss(), argnums=(0, 1))(c.x, c.w))
    assert backward == {"all_to_all": 4 * axes, "all_reduce": 2 * axes}


@pytest.mark.parametrize("shape", [(2, 8, 6), (2, 7, 3)], ids=["even", "uneven"])
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2), (1, 1, 4)], ids=str)
def test_equal_to_dense(sizes: Sizes, shape: tuple[int, int, int], ranks: Pool) -> None:
    ranks.run(around, sizes, shape)
    ranks.run(inside, sizes, shape)


def test_copies_and_collectives(ranks: Pool) -> None:
    for sizes in ((1, 2, 2), (1, 1, 4)):
        ranks.run(replicated_both_ways, sizes, (4, 7, 3))
        ranks.run(communicates, sizes, (2, 7, 3))


def refused(sizes: Sizes) -> None:
    mesh, shape = mesh_of(sizes), (2, 7, 6)
    x, even = wrap(dense(shape), SEQ, mesh), wrap(dense((2, 8, 6)), SEQ, mesh)
    other = wrap(dense((2, 8, 6)), SEQ, mesh_of((1, 1, 4)))

    def never(*args: Any) -> Any:
        raise AssertionError("fn must not run")

    def call(
        in_specs: Any, out_specs: Any, *args: Any, fn: Callable[..., Any] = never, **options: Any
    ) -> Callable[[], Any]:
        return lambda: shard_map(fn, mesh, in_specs, out_specs, **options)(*args)

    def same(x: Any) -> Any:
        return x

    for run, message in [
        (
            call((SEQ,), SEQ, x),
            "out_shapes=None must mean even shards, got an argument placed .* cut unevenly",
        ),
        (call((SEQ,), SEQ, even.to_local()), "must be DTensors, got a plain tensor of"),
        (call((SEQ,), SEQ, other), "must live on its mesh"),
        (call(SEQ, SEQ, even), "in_specs=.* must be a tuple with one entry per argument, got 1"),
        (call((SEQ, SEQ), SEQ, even), "one entry per argument, got 1"),
        (call((None,), SEQ, even), "in_specs must give a P for a tensor of .2, 8, 6., got None"),
        (call((P("dp", None),), SEQ, even), r"in_specs=P\('dp', None\) must name 3 dimensions, got 2"),
        (call((P("tp", None, None),), SEQ, even), "must use axes of the mesh"),
        (call((P(None, ("ulysses", "ring"), None),), SEQ, even), "in mesh order"),
        (call(({"a": SEQ},), SEQ, even), "in_specs=.* must be a prefix of the pytree"),
        (call((SEQ,), P("dp", None), even, fn=same), "out_specs=.* must name 3 dimensions, got 2"),
        (call((SEQ,), None, even, fn=same), "out_specs must give a P for a tensor of"),
        (call((SEQ,), SEQ, even, fn=same, out_shapes=(2, 16, 6)), r"out_shapes=\(2, 16, 6\) must match"),
        (call((SEQ,), (SEQ, SEQ), even, fn=same), "out_specs=.* must be a prefix"),
    ]:
        with Comm() as mode, pytest.raises(ValueError, match=message):
            run()
        assert mode.get_total_counts() == 0, message
    with pytest.raises(NotImplementedError, match="vmap must not batch a DTensor"):
        vmap(shard_map(same, mesh, (P(RU, None),), P(RU, None)))(even)
    passed = shard_map(lambda x, n, s: (x * n, s), mesh, (SEQ, None, None), (SEQ, None))(even, 3, "name")
    assert_is(passed[0], SEQ, 3 * dense((2, 8, 6)))
    assert passed[1] == "name"


def test_refused(ranks: Pool) -> None:
    ranks.run(refused, (1, 2, 2))
