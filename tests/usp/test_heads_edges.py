"""Ulysses' moves under torch.compile, on one rank, and what they refuse (before anything is sent)."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import grad

from tests.comm import Comm
from tests.mesh.cases import Sizes, dense, mesh_of, outside
from tests.pool import Pool
from tests.usp.test_heads import TABLE, Problem, assert_same
from usp import heads_to_seq, seq_to_heads
from usp.mesh import TABLES, P

ONE = {"dp": 1, "ring": 1, "ulysses": 1}


def compiled(sizes: Sizes, heads: tuple[int, int]) -> None:
    # cases D61, P12, P13: one graph, and gradients that are there
    p = Problem(sizes, heads, (2, 7))
    if p.out:
        return

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """There and back: the loss, and the moved q that must be the old one."""
        moved = p.move(q, k, v)
        loss = sum(((p.after(c) * t**2).sum() for c, t in zip(p.C, moved, strict=True)), torch.zeros(()))
        return loss + (p.before(p.C[0]) * p.back(moved[0])).sum()

    step = torch.compile(whole, fullgraph=True, backend="aot_eager")
    want = (p.gradients()[0] + p.before(p.C[0]), *p.gradients()[1:])
    leaves = [t.clone().requires_grad_() for t in p.qkv]
    value = step(*leaves)
    assert torch.equal(value, whole(*p.qkv))
    value.backward()
    assert_same(tuple(t.grad for t in leaves), want, "compiled")  # type: ignore[misc]
    inside = torch.compile(grad(whole, argnums=(0, 1, 2)), fullgraph=True, backend="aot_eager")
    assert_same(inside(*p.qkv), want, "compiled around grad")


def test_compiled(ranks: Pool) -> None:
    ranks.run(compiled, (1, 1, 2), (9, 3))  # uneven heads, uneven S, a kv head on both ranks


def test_one_rank_moves_nothing() -> None:
    q, k = dense((2, 7, 9, 2)), dense((2, 7, 3, 2))
    moved = seq_to_heads(q, k, k, mesh=ONE, table=TABLE, seq_len=7)
    assert moved[0] is q
    assert moved[1] is k
    assert heads_to_seq(q, num_heads=9, mesh=ONE, table=TABLE, seq_len=7) is q


def refusals() -> None:
    mesh = mesh_of((1, 1, 4))
    if outside(mesh):
        return
    q, k = dense((1, 2, 9, 2)), dense((1, 2, 3, 2))
    both_sharded = replace(TABLES["usp"], name="mine", q=P("dp", "ulysses", "ring", None))
    two_axes = replace(TABLES["usp"], name="mine", q=P("dp", None, ("ring", "ulysses"), None))
    cases = (
        ("multiple of num_kv_heads", (q, k[:, :, :2], k[:, :, :2]), TABLE, 8),
        ("must be .B, S, K, H.", (q, k, k[:, :, :1]), TABLE, 8),
        ("must be .B, S, K, H.", (q, k[..., :1], k), TABLE, 8),
        ("must be .B, S, K, H.", (q, k[:, :1], k[:, :1]), TABLE, 8),
        ("pass sizes that add up", (q, k, k), TABLE, 12),
    )
    with Comm() as comm:
        for message, (qx, kx, vx), table, seq_len in cases:
            with pytest.raises(ValueError, match=message):
                seq_to_heads(qx, kx, vx, mesh=mesh, table=table, seq_len=seq_len)
        for o, seq_len in ((q[:, :, :1], 2), (q[:, :, :2], 3), (q[:, :, :4], 2)):
            with pytest.raises(ValueError, match=f"on this rank, got seq_len={seq_len}, num_heads=9"):
                heads_to_seq(o, num_heads=9, mesh=mesh, table=TABLE, seq_len=seq_len)
    assert comm.get_total_counts() == 0
    square = mesh_of((1, 2, 2))
    for table in (both_sharded, two_axes):
        with Comm() as comm, pytest.raises(ValueError, match="Change table 'mine'"):
            seq_to_heads(q, k, k, mesh=square, table=table, seq_len=8)
        assert comm.get_total_counts() == 0


def test_refused_on_every_rank(ranks: Pool) -> None:
    # each rank raises by itself, so nobody waits for the others
    ranks.run(refusals)
