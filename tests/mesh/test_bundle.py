"""`Bundle`: equal to leaf-by-leaf moves, to the last bit forward and summed backward, in one collective."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from tests.comm import Comm
from tests.mesh.cases import Sizes, assert_stands_for, dense, mesh_of, outside, shard
from tests.pool import Pool
from usp import value_and_grad
from usp.mesh import P, dual, redistribute
from usp.mesh.bundle import Bundle

ALL = ("dp", "ring", "ulysses")
KEEP = ("ulysses", "dp", "ring")
Leaves = tuple[tuple[P, P, tuple[int, ...]], ...]
# Uneven everywhere: 7, 5 and 3 over 4 ranks leave some with less, or with nothing.
WHOLE: Leaves = (
    (P(ALL, None), P(None, None), (7, 3)),
    (P(None, ALL), P(None, None), (2, 5)),
    (P(ALL), P(None), (3,)),
    (P(None, None), P(None, None), (2, 2)),  # replicated: does not move
    (P(ALL, None), P(None, None), (8, 3)),
    (P(KEEP, None), P(None, None), (9, 2)),  # parts in another order than the ranks
    (P(KEEP, None), P(None, None), (8, 2)),
)
PART: Leaves = (  # in use still cut over ulysses, wo along its second dimension
    (P(KEEP, None), P("ulysses", None), (11, 3)),
    (P(None, KEEP), P(None, "ulysses"), (2, 9)),
    (P(KEEP), P("ulysses"), (5,)),
    (P(ALL), P(None), (3,)),  # gathered over more axes than the others: a collective of its own
)
CASES: dict[str, tuple[Sizes, Leaves, int]] = {  # mesh, leaves, collectives each way
    "one axis": ((1, 1, 4), WHOLE, 1),
    "the world": ((2, 1, 2), WHOLE, 1),
    "3 ranks": ((3, 1, 1), WHOLE, 1),
    "part": ((2, 1, 2), PART, 2),
    "part, nothing to gather for most": ((1, 1, 4), PART, 1),
    "one rank": ((1, 1, 1), WHOLE, 0),
    "two of three axes": ((2, 2, 1), PART, 1),
}


class Problem:
    def __init__(
        self, case: str, dtype: torch.dtype | None = None, rest: torch.dtype = torch.float64
    ) -> None:
        sizes, leaves, self.count = CASES[case]
        self.mesh = mesh_of(sizes)
        self.out = outside(self.mesh)
        if self.out:
            return
        self.srcs, self.dsts, self.shapes = (list(column) for column in zip(*leaves, strict=True))
        self.bundle = Bundle(self.srcs, self.dsts, self.mesh, self.shapes, dtype)
        self.X = [dense(shape, seed=i + 1).to(rest) for i, shape in enumerate(self.shapes)]
        self.V = [dense(shape, seed=i + 21).to(rest) for i, shape in enumerate(self.shapes)]
        C = [dense(shape, seed=i + 41).to(rest) for i, shape in enumerate(self.shapes)]
        self.C = C
        self.x, self.v = (
            [shard(t, s, self.mesh) for t, s in zip(whole, self.srcs, strict=True)]
            for whole in (self.X, self.V)
        )
        self.c = [shard(t, dual(s, self.mesh), self.mesh) for t, s in zip(C, self.dsts, strict=True)]

    def loss(self, *x: Tensor) -> Tensor:
        """Densely the sum of C * X ** 3, whose gradient is 3 C X^2 and Hessian product 6 C X V."""
        used = self.bundle(x)
        total = torch.zeros((), dtype=x[0].dtype)
        for c, y in zip(self.c, used, strict=True):
            assert y is not None
            total = total + (c * y**3).sum()
        return total

    def apart(self, late: bool, *x: Tensor) -> Tensor:
        """As `loss`, by a departure and an arrival."""
        journey, number = self.bundle.depart(x, late=late)
        terms = []
        for c, y in zip(self.c, self.bundle.arrive(x, journey, number), strict=True):
            assert y is not None
            terms.append((c * y**3).sum())
        return torch.stack(terms).sum()


def in_two_halves(case: str, late: bool, world: int = 4) -> None:
    """Gradients and, by plain autograd, Hessian products; a graph that is gone through twice."""
    with patch("torch.distributed.get_world_size", return_value=world):
        p = Problem(case)
    if p.out:
        return

    def loss(*x: Tensor) -> Tensor:
        return p.apart(late, *x)

    numbers = tuple(range(len(p.x)))
    with Comm() as together:
        grad(p.loss, numbers)(*p.x)
    with Comm() as both:
        by_func = grad(loss, numbers)(*p.x)
    assert both.kinds() == together.kinds()
    _, by_usp = value_and_grad(loss, numbers)(*p.x)
    leaves = [t.clone().requires_grad_() for t in p.x]
    value = loss(*leaves)
    twice = [torch.autograd.grad(value, leaves, retain_graph=True) for _ in range(2)]
    slopes = torch.autograd.grad(value, leaves, create_graph=True)
    for grads in (by_func, by_usp, *twice, slopes):
        for g, X, C, src in zip(grads, p.X, p.C, p.srcs, strict=True):
            assert_stands_for(g.detach(), dual(src, p.mesh), p.mesh, 3 * C * X**2)
    slope = torch.stack([(g * v).sum() for g, v in zip(slopes, p.v, strict=True)]).sum()
    for g, X, V, C, src in zip(torch.autograd.grad(slope, leaves), p.X, p.V, p.C, p.srcs, strict=True):
        assert_stands_for(g, dual(src, p.mesh), p.mesh, 6 * C * X * V)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("case", ["the world", "part", "3 ranks", "two of three axes"])
def test_a_departure_and_an_arrival(case: str, late: bool, ranks: Pool) -> None:
    ranks.run(in_two_halves, case, late)


def test_halves_of_several_stages(ranks: Pool) -> None:
    ranks.run(in_two_halves, "the world", True, 8)  # where the mesh is a part of the world, made believe


def one_collective(case: str) -> None:
    p = Problem(case)
    if p.out:
        return
    numbers = tuple(range(len(p.x)))
    with Comm() as forward:
        got = p.bundle.start(p.x).wait()
    for y, X, dst in zip(got, p.X, p.dsts, strict=True):
        assert y is not None
        assert_stands_for(y, dst, p.mesh, X)
    assert forward.kinds() == ({"all_gather": p.count} if p.count else {})
    with Comm() as backward:
        back = p.bundle.start_transpose(p.c, [t.dtype for t in p.x]).wait()
    assert backward.kinds() == ({"reduce_scatter": p.count} if p.count else {})
    for g, C, src in zip(back, p.C, p.srcs, strict=True):
        assert g is not None
        assert_stands_for(g, dual(src, p.mesh), p.mesh, C)
    with Comm() as both:
        grads = grad(p.loss, numbers)(*p.x)
    assert sum(both.kinds().values()) == 2 * p.count
    leaves = [t.clone().requires_grad_() for t in p.x]
    by_autograd = torch.autograd.grad(p.loss(*leaves), leaves)
    pull: Any = vjp(p.loss, *p.x)[1]
    for all_grads in (grads, by_autograd, pull(torch.ones((), dtype=torch.float64))):
        for g, X, C, src in zip(all_grads, p.X, p.C, p.srcs, strict=True):
            assert_stands_for(g, dual(src, p.mesh), p.mesh, 3 * C * X**2)


def second_order(case: str) -> None:
    p = Problem(case)
    if p.out:
        return
    numbers = tuple(range(len(p.x)))
    forward_over_reverse = jvp(grad(p.loss, numbers), tuple(p.x), tuple(p.v))[1]

    def slope(*x: Tensor) -> Tensor:
        products = [(g * v).sum() for g, v in zip(grad(p.loss, numbers)(*x), p.v, strict=True)]
        return torch.stack(products).sum()

    for twice in (forward_over_reverse, grad(slope, numbers)(*p.x)):
        for g, X, V, C, src in zip(twice, p.X, p.V, p.C, p.srcs, strict=True):
            assert_stands_for(g, dual(src, p.mesh), p.mesh, 6 * C * X * V)
    # a tangent for one leaf alone
    moved = jvp(lambda y: tuple(t for t in p.bundle([y, *p.x[1:]]) if t is not None), (p.x[0],), (p.v[0],))[1]
    assert_stands_for(moved[0], p.dsts[0], p.mesh, p.V[0])
    assert all(torch.equal(t, torch.zeros_like(t)) for t in moved[1:])
    # vmap: one leaf mapped, along its last dimension, the others not
    stacked = torch.stack([p.x[0], 2 * p.x[0]], -1)
    mapped: Any = vmap(lambda y: p.bundle([y, *p.x[1:]])[0], in_dims=-1)(stacked)
    assert_stands_for(mapped[1], p.dsts[0], p.mesh, 2 * p.X[0])


@pytest.mark.parametrize("case", CASES)
def test_one_collective_each_way(case: str, ranks: Pool) -> None:
    ranks.run(one_collective, case)


@pytest.mark.parametrize("case", ["the world", "part", "3 ranks", "one rank"])
def test_every_transform(case: str, ranks: Pool) -> None:
    ranks.run(second_order, case)


def narrow(case: str) -> None:
    """bfloat16 on the wire, sums in float32, gradients in the dtype at rest."""
    p = Problem(case, torch.bfloat16, torch.float32)
    with Comm():
        used = p.bundle.start(p.x).wait()
    for y, X, dst in zip(used, p.X, p.dsts, strict=True):
        assert y is not None
        assert y.dtype == torch.bfloat16
        assert_stands_for(y, dst, p.mesh, X.bfloat16())
    # 1 + 2^-8 on each of 4 ranks: 4 + 2^-6 in float32, but 4 in bfloat16, whose step there is 2^-5
    grads = [torch.full_like(y, 1.0).float() + 2.0**-7 for y in used if y is not None]
    seen = p.bundle.start_transpose([g.bfloat16() for g in grads], [t.dtype for t in p.x]).wait()
    for i, g in enumerate(seen):
        assert g is not None
        assert g.dtype == torch.float32
        if i in p.bundle.moving:
            assert torch.equal(g, torch.full_like(g, 4 * (1 + 2.0**-7)))
    # the same under autograd
    leaves = [t.clone().requires_grad_() for t in p.x]
    for used in (p.bundle(leaves), p.bundle.arrive(leaves, *p.bundle.depart(leaves, late=True))):
        out = [y for y in used if y is not None]
        by_autograd = torch.autograd.grad(out, leaves, [g.bfloat16() for g in grads])
        for g, want in zip(by_autograd, seen, strict=True):
            assert want is not None
            assert g.dtype == torch.float32
            assert torch.equal(g, want)


def test_narrow_on_the_wire_wide_in_the_sum(ranks: Pool) -> None:
    # case H9
    ranks.run(narrow, "the world")


def frozen_and_other_moves() -> None:
    """A gradient that is not wanted does not travel; a move that is no gather is carried out leaf by leaf."""
    mesh = mesh_of((2, 1, 2))
    specs = [
        (P(("dp", "ulysses"), None), P(None, None)),
        (P(ALL), P(None)),
        (P(ALL, None), P("ulysses", None)),
    ]
    shapes: list[tuple[int, ...]] = [(6, 2), (5,), (7, 2)]
    bundle = Bundle([s[0] for s in specs], [s[1] for s in specs], mesh, shapes)
    X = [dense(shape, seed=i + 1) for i, shape in enumerate(shapes)]
    x = [shard(t, src, mesh) for t, (src, _) in zip(X, specs, strict=True)]
    for y, whole, (src, dst) in zip(bundle.start(x).wait(), X, specs, strict=True):
        assert y is not None
        assert_stands_for(y, dst, mesh, whole)
        assert torch.equal(y, redistribute(shard(whole, src, mesh), src, dst, mesh, shape=tuple(whole.shape)))
    with Comm() as mode:
        back = bundle.start_transpose([None, torch.ones(5), None], [None, torch.float32, None]).wait()
    assert back[0] is None
    assert back[2] is None
    assert mode.kinds() == {"reduce_scatter": 1}
    assert back[1] is not None
    assert torch.equal(back[1], torch.full_like(x[1], 4.0).float())


def test_frozen_leaves_and_other_moves(ranks: Pool) -> None:
    ranks.run(frozen_and_other_moves)


def axis_by_axis() -> None:
    """Where the mesh is a part of the world (made believe here), several axes are gathered one by one."""
    with patch("torch.distributed.get_world_size", return_value=8):
        p = Problem("the world")
    with Comm() as mode:
        got = p.bundle.start(p.x).wait()
        back = p.bundle.start_transpose(p.c, [t.dtype for t in p.x]).wait()
    for y, g, X, C, src, dst in zip(got, back, p.X, p.C, p.srcs, p.dsts, strict=True):
        assert y is not None
        assert g is not None
        assert_stands_for(y, dst, p.mesh, X)
        assert_stands_for(g, dual(src, p.mesh), p.mesh, C)
    assert mode.kinds() == {"all_gather": 2, "reduce_scatter": 2}


def test_axis_by_axis(ranks: Pool) -> None:
    ranks.run(axis_by_axis)


def own_group() -> None:
    group: Any = dist.new_group(list(range(4)))
    mesh = mesh_of((2, 1, 2))
    bundle = Bundle([P(ALL)], [P(None)], mesh, [(6,)], group=str(group.group_name))
    whole = dense((6,))
    with Comm() as mode:
        (got,) = bundle.start([shard(whole, P(ALL), mesh)]).wait()
    assert got is not None
    assert torch.equal(got, whole)
    assert mode.kinds() == {"all_gather": 1}


def test_a_group_of_its_own(ranks: Pool) -> None:
    ranks.run(own_group)


def test_refused() -> None:
    one = {"dp": 1, "ring": 1, "ulysses": 1}
    with pytest.raises(ValueError, match="must be of one length"):
        Bundle([P(None)], [], one, [(3,)])
    with pytest.raises(ValueError, match=r"srcs\[0\]=P\('tp'\) must use axes of the mesh"):
        Bundle([P("tp")], [P(None)], one, [(3,)])
    with pytest.raises(ValueError, match="must be floating point"):
        Bundle([P(None)], [P(None)], one, [(3,)], torch.int64)
    bundle = Bundle([P("dp"), None], [P(None), None], one, [(3,), None])
    with pytest.raises(ValueError, match=r"tensors\[0\]=\(4,\) must be this rank's shard \(3,\)"):
        bundle([torch.ones(4), None])
    with pytest.raises(ValueError, match=r"tensors\[1\]=\(4,\) must be this rank's shard None"):
        bundle([torch.ones(3), torch.ones(4)])
    got = bundle([torch.ones(3), None])
    assert got[1] is None
