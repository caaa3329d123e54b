"""`seq_to_heads` and `heads_to_seq` on 2, 3 and 4 ranks: exact values and gradients, 1 all-to-all each way.

Inputs are whole numbers in float64, different in every place, so every comparison is exact.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from tests.comm import counted
from tests.mesh.cases import Sizes, dense, mesh_of, outside
from tests.pool import Pool
from usp import heads_to_seq, seq_to_heads
from usp.deal import deal_heads
from usp.mesh import TABLES, P, local_slices

TABLE = TABLES["usp"]
BY_SEQ, BY_HEAD = P("dp", ("ring", "ulysses"), None, None), P("dp", "ring", None, None)
# some fewer than the ranks (H52); 30 and 56 (P45)
HEADS = ((9, 3), (3, 1), (5, 5), (7, 7), (8, 2), (6, 2), (10, 5), (2, 1), (30, 10), (56, 8))
MESHES: tuple[Sizes, ...] = ((1, 1, 2), (1, 1, 3), (1, 1, 4), (1, 2, 2), (2, 1, 2))
BATCHES = (
    (1, 13),
    (2, 7),
    (3, 8),
    (2, 5),
)  # (B, S): on 4 ranks S=5 leaves one without a token (case D20, H54)
SIZE = 2


class Problem:
    """Global q, k, v, coefficients per query head, and this rank's part of them."""

    def __init__(self, sizes: Sizes, heads: tuple[int, int], batch: tuple[int, int]) -> None:
        self.mesh = mesh_of(sizes)
        self.out = outside(self.mesh)
        if self.out:
            return
        self.num_heads, self.num_kv = heads
        self.seq_len = batch[1]
        self.group = self.num_heads // self.num_kv
        rows = batch[0] * sizes[0]
        self.QKV = tuple(
            dense((rows, self.seq_len, n, SIZE)) + 10_000 * i
            for i, n in enumerate((heads[0], heads[1], heads[1]))
        )
        self.C = tuple(dense((rows, self.seq_len, self.num_heads, SIZE), seed=s) for s in (1, 2, 3))
        self.deal = deal_heads(*heads, sizes[2])[self.mesh.get_coordinate()[2]]  # type: ignore[index]
        self.qkv = tuple(self.before(t) for t in self.QKV)

    def before(self, x: Tensor) -> Tensor:
        return x[local_slices(BY_SEQ, tuple(x.shape), self.mesh)].clone()

    def after(self, x: Tensor) -> Tensor:
        """This rank's part of an x that has one entry per query head, where attention runs."""
        return x[local_slices(BY_HEAD, tuple(x.shape), self.mesh)][:, :, self.deal.q_start : self.deal.q_stop]

    def move(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v at the heads, k and v repeated to one per query head, as attention reads them."""
        moved = self.move_all(q, k, v)
        assert moved[1].shape == moved[2].shape
        return moved

    def move_all(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = seq_to_heads(q, k, v, mesh=self.mesh, table=TABLE, seq_len=self.seq_len)
        assert q.shape[2] == k.shape[2] == 0 or q.shape[2] % k.shape[2] == 0
        times = q.shape[2] // max(k.shape[2], 1)
        return q, k.repeat_interleave(times, 2), v.repeat_interleave(times, 2)

    def back(self, o: Tensor) -> Tensor:
        return heads_to_seq(o, num_heads=self.num_heads, mesh=self.mesh, table=TABLE, seq_len=self.seq_len)

    def per_query_head(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.QKV
        return q, k.repeat_interleave(self.group, 2), v.repeat_interleave(self.group, 2)

    def loss(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Other coefficients for every query head, so each replica of a kv head sends another gradient."""
        moved = self.move(q, k, v)
        return sum(
            ((self.after(c) * t**2).sum() for c, t in zip(self.C, moved, strict=True)), torch.zeros(())
        )

    def gradients(self) -> tuple[Tensor, ...]:
        """Of the sum of all ranks' losses, this rank's part."""
        full = [2 * c * t for c, t in zip(self.C, self.per_query_head(), strict=True)]
        kv = [g.unflatten(2, (self.num_kv, self.group)).sum(3) for g in full[1:]]
        return tuple(self.before(g) for g in (full[0], *kv))


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], note: object) -> None:
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w), note


def values_and_round_trip(sizes: Sizes) -> None:
    # cases H48, H50, H53, H54, D18, D20, D22, D25, P45, P68
    for heads in HEADS:
        for batch in BATCHES:
            p = Problem(sizes, heads, batch)
            if p.out:
                continue
            moved = p.move(*p.qkv)
            assert_same(moved, tuple(p.after(t) for t in p.per_query_head()), (heads, batch))
            assert torch.equal(p.back(moved[0]), p.qkv[0]), (heads, batch)


def gradients(sizes: Sizes) -> None:
    # cases H50, D22, D25, P68: every replica's gradient is summed, nothing twice
    for heads in HEADS:
        for batch in BATCHES:
            p = Problem(sizes, heads, batch)
            if p.out:
                continue
            want, every = p.gradients(), (0, 1, 2)
            assert_same(grad(p.loss, argnums=every)(*p.qkv), want, ("grad", heads, batch))
            leaves = [t.clone().requires_grad_() for t in p.qkv]
            p.loss(*leaves).backward()
            assert_same(tuple(t.grad for t in leaves), want, ("backward", heads, batch))  # type: ignore[misc]
            o, pull = vjp(p.back, p.after(p.QKV[0]))[:2]
            assert torch.equal(pull(3 * o)[0], 3 * p.after(p.QKV[0])), ("output", heads, batch)


def transforms(sizes: Sizes) -> None:
    # case P22
    for heads, batch in (((9, 3), (2, 7)), ((10, 5), (1, 13)), ((5, 5), (2, 5))):
        p = Problem(sizes, heads, batch)
        if p.out:
            continue
        every, tangents = (0, 1, 2), tuple(t * 3 - 1 for t in p.qkv)
        value, pull = vjp(p.loss, *p.qkv)[:2]
        assert_same(pull(torch.ones_like(value)), p.gradients(), ("vjp", heads))
        out, out_t = jvp(p.move, p.qkv, tangents)[:2]
        assert_same(out_t, tuple(t * 3 - 1 for t in out), ("jvp", heads))
        back, back_t = jvp(p.back, (out[0],), (2 * out[0],))[:2]
        assert torch.equal(back_t, 2 * back), ("jvp of the output", heads)
        stacked = tuple(torch.stack([a, b], 1) for a, b in zip(p.qkv, tangents, strict=True))
        loop = [torch.stack(pair) for pair in zip(p.move(*p.qkv), p.move(*tangents), strict=True)]
        assert_same(vmap(p.move, in_dims=1)(*stacked), tuple(loop), ("vmap", heads))
        assert torch.equal(vmap(p.back)(loop[0]), torch.stack([p.qkv[0], tangents[0]])), ("vmap back", heads)
        only_q = vmap(p.move, in_dims=(1, None, None))(stacked[0], *p.qkv[1:])
        assert torch.equal(only_q[1][1], loop[1][0]), ("vmap over q alone", heads)
        each = [grad(p.loss, argnums=every)(*t) for t in (p.qkv, tangents)]
        want = tuple(torch.stack(pair) for pair in zip(*each, strict=True))
        assert_same(vmap(grad(p.loss, argnums=every), in_dims=1)(*stacked), want, ("vmap of grad", heads))
        hvp = jvp(grad(p.loss, argnums=every), p.qkv, tangents)[1]
        linear = grad(p.loss, argnums=every)(
            *tangents
        )  # the loss is quadratic: its Hessian times v is grad at v
        assert_same(hvp, linear, ("second derivative", heads))


def counts(sizes: Sizes) -> None:
    # section 8 of the design: 1 all-to-all for q, k, v and 1 for the output, each way, and nothing else
    p = Problem(sizes, (9, 3), (2, 7))
    if p.out:
        return
    leaves = [t.clone().requires_grad_() for t in p.qkv]

    one = {"all_to_all": 1}
    loss, outs = [], []
    assert counted(lambda: loss.append(p.loss(*leaves))) == one
    assert counted(lambda: loss[0].backward()) == one
    o = p.after(p.QKV[0]).requires_grad_()
    assert counted(lambda: outs.append(p.back(o))) == one
    assert counted(lambda: outs[0].sum().backward()) == one
    assert counted(lambda: grad(p.loss, argnums=(0, 1, 2))(*p.qkv)) == {"all_to_all": 2}


def wide_sums(sizes: Sizes) -> None:
    # cases H9, H13, P18: replicas of a kv head add up in float32, then are rounded once
    p = Problem(sizes, (4, 1), (1, 4))
    if p.out:
        return
    q, k, v = (t.bfloat16() for t in p.qkv)
    # bfloat16 has steps of 2^-7 above 1: with the 1 second, the others are lost in whichever order they come
    part = 1.0 if p.deal.q_start == 1 else 2.0**-9

    def loss(k: Tensor, v: Tensor) -> Tensor:
        _, k, v = seq_to_heads(q, k, v, mesh=p.mesh, table=TABLE, seq_len=4)
        return part * (k.float().sum() + v.float().sum())

    want = torch.full_like(k, 1 + 3 * 2.0**-9)
    assert want.flatten()[0] > 1
    assert_same(grad(loss, argnums=(0, 1))(k, v), (want, want), "bfloat16")


@pytest.mark.parametrize("check", [values_and_round_trip, gradients, transforms], ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_equal_to_dense(sizes: Sizes, check: Callable[[Sizes], None], ranks: Pool) -> None:
    # case D28: any number of heads and tokens on any number of ranks
    ranks.run(check, sizes)


def sizes_of_v(sizes: Sizes) -> None:
    # cases P53, H56, D29: v of its own size, and another call with other heads and sizes beside it
    for heads, size, v_size in (((9, 3), 4, 6), ((5, 5), 6, 2), ((2, 1), 3, 2)):
        p = Problem(sizes, heads, (2, 7))
        if p.out:
            continue
        full = (dense((2, 7, heads[0], size)), dense((2, 7, heads[1], size)), dense((2, 7, heads[1], v_size)))
        q, k, v = (p.before(t) for t in full)
        moved = p.move_all(q, k, v)
        want = (full[0], *(t.repeat_interleave(p.group, 2) for t in full[1:]))
        assert_same(moved, tuple(p.after(t) for t in want), (heads, size, v_size))
        grads = grad(lambda *x, p=p: sum((t**2).sum() for t in p.move_all(*x)), argnums=(0, 1, 2))(q, k, v)
        # each query head's copy of its kv head adds twice its value
        times = (2, 2 * p.group, 2 * p.group)
        assert_same(grads, tuple(n * t for n, t in zip(times, (q, k, v), strict=True)), (heads, size, v_size))
        assert torch.equal(p.back(p.after(want[2])), p.before(want[2]))


@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 1, 4)], ids=str)
def test_v_of_its_own_size(sizes: Sizes, ranks: Pool) -> None:
    ranks.run(sizes_of_v, sizes)


def test_collectives(ranks: Pool) -> None:
    ranks.run(counts, (1, 1, 2))
    ranks.run(counts, (1, 1, 4))
    ranks.run(wide_sums, (1, 1, 4))
