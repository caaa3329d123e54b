"""Attention by chunks of heads: who gets which heads when, what is sent, and how little lives at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.comm import Comm
from tests.mesh.cases import mesh_of
from tests.pool import Pool
from tests.usp.dense import Watch, normal
from usp import attention, kernels
from usp.deal import deal_heads
from usp.head_chunks import Projections, Range, chunked_attention, deal_chunks
from usp.heads import seq_to_heads
from usp.heads_back import heads_to_seq
from usp.mesh import TABLES
from usp.ring import Ring
from usp.setting import mask_of

D, H, E = 6, 4, 5


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.data())
def test_every_head_once_and_its_keys_in_time(
    num_kv: int, group: int, parts: int, data: st.DataObject
) -> None:
    num_heads = num_kv * group
    deals = deal_heads(num_heads, num_kv, parts)
    num_chunks = data.draw(st.integers(1, max(d.q_stop - d.q_start for d in deals)))
    chunks = deal_chunks(num_heads, num_kv, parts, num_chunks)
    for rank, whole in enumerate(deals):
        heads, sent = [], set()
        for chunk in chunks:
            deal, (start, stop) = chunk.deals[rank], chunk.fresh[rank]
            assert sent.isdisjoint(range(start, stop))  # each kv head comes once
            sent |= set(range(start, stop))
            own = range(deal.q_start, deal.q_stop)
            heads += list(own)
            assert {head // group for head in own} == set(range(deal.kv_start, deal.kv_stop)) <= sent
        assert heads == list(range(whole.q_start, whole.q_stop))
        assert sent == set(range(whole.kv_start, whole.kv_stop))


def test_more_chunks_than_heads_refused() -> None:
    with pytest.raises(ValueError, match=r"head_chunks=4 must be from 1 to the 3 query heads of a rank"):
        deal_chunks(5, 5, 2, 4)
    with pytest.raises(ValueError, match="head_chunks=0"):
        deal_chunks(5, 5, 2, 0)


def projected(x: Tensor, w: Tensor, num_heads: int) -> Tensor:
    return (x @ w.T).view(*x.shape[:2], num_heads, H)


def norm(x: Tensor, w: list[Tensor]) -> Tensor:
    return x.tanh() * w[4]


def turn_q(q: Tensor, w: list[Tensor], tokens: slice) -> Tensor:
    return q.sin() * w[5]


def turn_k(k: Tensor, w: list[Tensor], tokens: slice) -> Tensor:
    place = torch.arange(tokens.start, tokens.start + k.shape[1])
    return k * (place % 7 + 1)[:, None, None] / 9


def views(w: list[Tensor], q: Sequence[Range], kv: Sequence[Range]) -> tuple[list[Tensor], list[Tensor]]:
    each = [(w[0], a, b) for a, b in q] + [(t, a, b) for t in w[1:3] for a, b in kv]
    return [t[a * H : b * H] for t, a, b in each], []


MAKE = Projections(norm, views, turn_q, turn_k, reads=True)


def by_chunks(
    x: Tensor, w: list[Tensor], num_chunks: int, seq_len: int, mesh: object, heads: tuple[int, int]
) -> Tensor:
    chosen = kernels.choose("tiled", device=x.device, dtype=x.dtype, size=H, v_size=H, features=())
    return chunked_attention(
        x, w, w[3], MAKE, num_heads=heads[0], num_kv_heads=heads[1], num_chunks=num_chunks, size=H, v_size=H,
        mask=mask_of(x.shape[0], seq_len, 1, cu_seqlens=None, scale=0.3), place=Ring(), kernel=chosen,
        table=TABLES["ulysses"], mesh=mesh, seq_len=seq_len,  # type: ignore[arg-type]
    )  # fmt: skip


def at_once(x: Tensor, w: list[Tensor], seq_len: int, mesh: object, heads: tuple[int, int]) -> Tensor:
    there = {"mesh": mesh, "table": TABLES["ulysses"], "seq_len": seq_len}
    h, all_tokens = norm(x, w), slice(0, x.shape[1])
    q = turn_q(projected(h, w[0], heads[0]), w, all_tokens)
    k = turn_k(projected(h, w[1], heads[1]), w, all_tokens)
    q, k, v = seq_to_heads(q, k, projected(h, w[2], heads[1]), **there)  # type: ignore[arg-type]
    o = heads_to_seq(attention(q, k, v, scale=0.3, kernel="tiled"), num_heads=heads[0], **there)  # type: ignore[arg-type]
    return o.flatten(2) @ w[3].T


def weights(heads: tuple[int, int]) -> list[Tensor]:
    """For q, k, v, the result, the norm and what turns q."""
    shapes = [(n * H, D) for n in (heads[0], heads[1], heads[1])] + [(E, heads[0] * H), (D,), (H,)]
    return [normal(*shape, seed=i) for i, shape in enumerate(shapes)]


def against_unchunked() -> list[str]:
    """On 2 and 4 ranks: values equal to the last bit, gradients to rounding, and the collectives."""
    wrong = []
    mesh = mesh_of((1, 1, 4))
    rank = mesh.get_coordinate()[2]  # type: ignore[index]
    for heads, num_chunks in (((8, 2), 2), ((8, 4), 2), ((9, 3), 3), ((16, 2), 4), ((5, 1), 2), ((3, 3), 1)):
        w = [t.requires_grad_() for t in weights(heads)]
        x = normal(2, 10, D, seed=7).tensor_split([3, 6, 9], 1)[rank].clone().requires_grad_()
        up = normal(2, 10, E, seed=8).tensor_split([3, 6, 9], 1)[rank]
        whole = at_once(x, w, 10, mesh, heads)
        want = torch.autograd.grad(whole, [x, *w], up)
        with Comm() as comm:
            out = by_chunks(x, w, num_chunks, 10, mesh, heads)
        forward = comm.get_total_counts()
        with Comm() as comm:
            got = torch.autograd.grad(out, [x, *w], up)
        batches = sum(any(b > a for a, b in c.fresh) for c in deal_chunks(*heads, 4, num_chunks))
        if forward != 2 * num_chunks + batches:
            wrong.append(f"{heads} {num_chunks}: {forward} exchanges forward")
        if comm.get_total_counts() != 3 * num_chunks + 2 * batches:
            wrong.append(f"{heads} {num_chunks}: {comm.get_total_counts()} exchanges backward")
        if (out - whole).abs().max() > 1e-14:  # the same products, summed in blocks of other sizes
            wrong.append(f"{heads} {num_chunks}: {(out - whole).abs().max()}")
        # float64 rounding of sums over chunks, whose terms are of size 1 to 10
        wrong += [
            f"{heads} {num_chunks}: {i}"
            for i, (g, t) in enumerate(zip(got, want, strict=True))
            if (g - t).abs().max() > 1e-13 * t.abs().max()
        ]
    return wrong


def test_equal_to_all_heads_at_once(ranks: Pool) -> None:
    # case D24; S = 10 over 4 ranks is uneven, heads too
    for wrong in ranks.run(against_unchunked):
        assert not wrong


def test_live_memory_falls_with_the_chunks() -> None:
    """Above what must stay (x, output, what attention keeps), forward and backward."""
    heads, seq_len = (16, 4), 256
    one = {"dp": 1, "ring": 1, "ulysses": 1}
    peaks = []
    for num_chunks in (1, 4, 8):
        w = [t.requires_grad_() for t in weights(heads)]
        x = normal(1, seq_len, D, seed=7).requires_grad_()
        up = normal(1, seq_len, E, seed=8)
        with Watch() as watch:
            out = by_chunks(x, w, num_chunks, seq_len, one, heads)
            forward = watch.peak
            torch.autograd.grad(out, [x, *w], up)
        peaks.append((forward, watch.peak))
    for num_chunks, own in zip((4, 8), peaks[1:], strict=True):
        for peak, whole in zip(own, peaks[0], strict=True):
            # scores, q, k, v and their gradients are of one chunk; x, weights and the output stay whole
            assert peak * num_chunks <= 1.2 * whole, (num_chunks, peaks)
