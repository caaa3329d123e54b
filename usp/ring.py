"""One attention layer carried out run by run, with other ranks' keys and values where a ring shares them.

Two ways to the other ranks' keys, equal in result. "p2p" sends them around the ring, the next ones on their
way while these are used; in the backward their gradients travel along and are at home after the last step.
"gather" brings them all at once and scatters the summed gradients. Partial results are merged by log-sum-exp
in float32, so the error does not grow with the number of ranks.

Sources: ring attention, arXiv 2310.01889; merging of partial softmaxes, arXiv 2205.14135.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from usp.kernels import Kernel
from usp.mesh import collectives
from usp.spans import Mask, Run, runs


class Ring(NamedTuple):
    """Where this rank sits among those that share its sequence. `group` is empty where it has it alone."""

    group: str = ""
    degree: int = 1
    rank: int = 0
    gather: bool = False


class RingBytes(NamedTuple):
    """Bytes that one rank sends over the ring for one layer, forward and backward together."""

    p2p: int
    gather: int


def ring_bytes(kv_elements: int, itemsize: int, degree: int) -> RingBytes:
    """`kv_elements`: of k and v together on one rank.

    p2p: k and v go degree - 1 hops in each direction of the pass, their gradients degree hops in float32.
    gather: k and v go to degree - 1 ranks in each direction, their gradients come back once, in float32.
    """
    hops, wide = degree - 1, max(itemsize, 4)
    if not hops:
        return RingBytes(0, 0)
    return RingBytes(
        p2p=kv_elements * (2 * hops * itemsize + degree * wide),
        gather=kv_elements * hops * (2 * itemsize + wide),
    )


def gather_pays(num_heads: int, num_kv_heads: int, degree: int) -> bool:
    """Whether "auto" gathers: it always sends fewer bytes, and here needs no more room than q and o do."""
    return degree * num_kv_heads <= num_heads


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, ring: Ring, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """q [B, S, N, H], k [B, S, K, H], v [B, S, K, Hv] -> o [B, S, N, Hv], log-sum-exp [N, B * S].

    A rank without heads computes nothing; nor does the rest of its ring, which shares its heads.
    """
    shape = (*q.shape[:3], v.shape[3])
    if not q.shape[2]:
        return q.new_zeros(shape), q.new_zeros(0, q.shape[0] * q.shape[1])
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    merged = _Merged(q, v.shape[2])
    for source, k_s, v_s in _others_keys(k, v, ring):
        for run in runs(mask, ring.rank, source):
            o, lse = kernel.forward(*_rows(run, q, k_s, v_s), run.segments)
            merged.add(run.q, o, lse)
    o, lse = merged.result()
    return o.view(shape), lse


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    mask: Mask,
    ring: Ring,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in the shapes of `forward`; `o` and `lse` are those over all keys."""
    shapes = [t.shape for t in (q, k, v)]
    if not q.shape[2]:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    do, q, k, v, o = (t.flatten(0, 1) for t in (do, q, k, v, o))
    sums = _Sums(q)
    travelling = _Gradients(k, v, ring)
    for source, k_s, v_s in _others_keys(k, v, ring):
        local = _Sums(k_s), _Sums(v_s)
        for run in runs(mask, ring.rank, source):
            (a, b), (c, d) = run.q, run.k
            grads = kernel.backward(
                do[a:b], q[a:b], k_s[c:d], v_s[c:d], o[a:b], lse[:, a:b].contiguous(), run.segments
            )
            for total, rows, grad in zip((sums, *local), (run.q, run.k, run.k), grads, strict=True):
                total.add(rows, grad)
        travelling.add(source, *local)
    dq, dk, dv = (g.view(s) for g, s in zip((sums.result(), *travelling.result()), shapes, strict=True))
    return dq, dk, dv


def _rows(run: Run, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q[slice(*run.q)], k[slice(*run.k)], v[slice(*run.k)]


def _flat(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unflat(flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return flat[: k.numel()].view(k.shape), flat[k.numel() :].view(v.shape)


def _others_keys(k: Tensor, v: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(ring rank, its keys, its values), the own ones first; what comes next is under way meanwhile."""
    if ring.degree == 1:
        yield ring.rank, k, v
        return
    held = _flat(k, v)
    if ring.gather:
        # [T, K, H]@ring -> all ranks' [T, K, H]: 1 all-gather, behind the own part of attention
        whole = collectives.start_all_gather(held, ring.group, ring.degree)
        yield ring.rank, k, v
        everyone = collectives.wait(whole).view(ring.degree, -1)
        for step in range(1, ring.degree):
            source = (ring.rank - step) % ring.degree
            yield source, *_unflat(everyone[source], k, v)
        return
    for step in range(ring.degree):
        last = step == ring.degree - 1
        coming = None if last else collectives.start_shift(held, ring.group, ring.rank, ring.degree)
        yield (ring.rank - step) % ring.degree, *_unflat(held, k, v)
        if coming is not None:
            held = collectives.wait(coming)


class _Merged:
    """Partial attention outputs of this rank's rows, merged as they come."""

    def __init__(self, q: Tensor, v_size: int) -> None:
        self.shape, self.dtype = (*q.shape[:2], v_size), q.dtype
        self.o: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, rows: tuple[int, int], o: Tensor, lse: Tensor) -> None:
        if self.o is None or self.lse is None:
            assert rows == (0, self.shape[0]), "the first run covers every row"
            self.o, self.lse = o, lse
            return
        if self.o.dtype != lse.dtype:
            self.o = self.o.to(lse.dtype)  # sums from here on, in float32 or wider
        start, stop = rows
        own, mine = self.o[start:stop], self.lse[:, start:stop]
        # o = o_1 p + o_2 (1 - p), p = 1 / (1 + exp(lse_2 - lse_1)): no exponential that can overflow
        gap = lse - mine
        own += torch.sigmoid(gap).t().unsqueeze(2) * (o.to(own.dtype) - own)
        mine -= logsigmoid(-gap)

    def result(self) -> tuple[Tensor, Tensor]:
        assert self.o is not None
        assert self.lse is not None
        return self.o.to(self.dtype), self.lse


class _Sums:
    """A gradient that several runs add to: in float32 once there is more than one."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.total: Tensor | None = None
        self.summed = False

    def add(self, rows: tuple[int, int], part: Tensor) -> None:
        if self.total is None and rows == (0, self.like.shape[0]):
            self.total = part
            return
        if not self.summed:
            wide = torch.promote_types(self.like.dtype, torch.float32)
            start = torch.zeros_like(self.like, dtype=wide) if self.total is None else self.total.to(wide)
            self.total = start
            self.summed = True
        assert self.total is not None
        self.total[slice(*rows)] += part

    def result(self) -> Tensor:
        if self.total is None:
            return torch.zeros_like(self.like)
        return self.total.to(self.like.dtype)


class _Gradients:
    """Gradients of all ranks' k and v on their way home."""

    def __init__(self, k: Tensor, v: Tensor, ring: Ring) -> None:
        self.k, self.v, self.ring = k, v, ring
        self.wide = torch.promote_types(k.dtype, torch.float32)
        self.own: tuple[_Sums, _Sums] | None = None
        self.whole: Tensor | None = None  # gather: [ring rank, k and v]
        self.coming: Tensor | None = None  # p2p: what the ranks before have added

    def add(self, source: int, dk: _Sums, dv: _Sums) -> None:
        if self.ring.degree == 1:
            self.own = dk, dv
            return
        part = _flat(*(self._widened(s) for s in (dk, dv)))
        if self.ring.gather:
            if self.whole is None:
                self.whole = part.new_empty(self.ring.degree, part.numel())
            self.whole[source] = part
            return
        if self.coming is not None:
            part += collectives.wait(self.coming)
        # the keys move on, and their gradient with them; after the last step it is with their owner
        self.coming = collectives.start_shift(part, self.ring.group, self.ring.rank, self.ring.degree)

    def _widened(self, sums: _Sums) -> Tensor:
        if sums.total is None:
            return torch.zeros_like(sums.like, dtype=self.wide)
        return sums.total.to(self.wide)

    def result(self) -> tuple[Tensor, Tensor]:
        if self.own is not None:
            return self.own[0].result(), self.own[1].result()
        if self.whole is not None:
            mine = collectives.wait(
                collectives.start_reduce_scatter(self.whole, self.ring.group, self.ring.degree)
            )
        else:
            assert self.coming is not None
            mine = collectives.wait(self.coming)
        dk, dv = _unflat(mine.view(-1), self.k, self.v)
        return dk.to(self.k.dtype), dv.to(self.v.dtype)
