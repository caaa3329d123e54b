"""Attention a few heads at a time, so that q, k, v and what goes with them never exist for all heads at once.

Every rank's heads are cut into chunks of neighbours, so pretrained weights need no other order. A kv head is
sent once, with the first chunk that attends with it, and stays until the last that does. While one chunk's
attention runs, the next chunk is projected and exchanged, and the last one's result sent back. The idea of
chunks is that of UPipe (arXiv 2602.21196).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from usp import ring
from usp.heads import Deal, deal_heads, seq_lengths, trade, trade_back, trading_axis, with_equal_groups
from usp.kept import Kept
from usp.kernels import Kernel
from usp.mesh import MeshLike, Table, axis_sizes, coordinates
from usp.ring import Ring
from usp.side import Side
from usp.spans import Mask

Range = tuple[int, int]


class Chunk(NamedTuple):
    """Heads of one chunk, of each rank: those it attends with, and the kv heads that come with this chunk."""

    deals: tuple[Deal, ...]
    fresh: tuple[Range, ...]


def deal_chunks(num_heads: int, num_kv_heads: int, parts: int, num_chunks: int) -> tuple[Chunk, ...]:
    """Each rank's heads in `num_chunks` runs that differ by at most one head.

    Raises ValueError when no rank has as many heads, or groups do not divide.
    """
    deals = deal_heads(num_heads, num_kv_heads, parts)
    most = max(d.q_stop - d.q_start for d in deals)
    if not 1 <= num_chunks <= most:
        raise ValueError(
            f"head_chunks={num_chunks} must be from 1 to the {most} query heads of a rank, got "
            f"num_heads={num_heads} over {parts} ranks. Lower head_chunks."
        )
    group = num_heads // num_kv_heads
    sent = [d.kv_start for d in deals]
    chunks = []
    for c in range(num_chunks):
        own, fresh = [], []
        for rank, d in enumerate(deals):
            total = d.q_stop - d.q_start
            start, stop = (d.q_start + total * i // num_chunks for i in (c, c + 1))
            kv_start = start // group
            kv_stop = -(-stop // group) if stop > start else kv_start
            own.append(Deal(start, stop, kv_start, kv_stop))
            fresh.append((sent[rank], max(sent[rank], kv_stop)))
            sent[rank] = fresh[-1][1]
        chunks.append(Chunk(tuple(own), tuple(fresh)))
    return tuple(chunks)


class Projections(NamedTuple):
    """How to make heads of an x placed as `table.attn_x`, with what else q, k and v go through.

    q(x, weights, ranges) -> [B, S, N', H] and kv(x, weights, ranges) -> k, v [B, S, K', H] of the given
    ranges of heads, one after the other. Neither may communicate.
    """

    q: Callable[[Tensor, Any, Sequence[Range]], Tensor]
    kv: Callable[[Tensor, Any, Sequence[Range]], tuple[Tensor, Tensor]]


@dataclass
class _Job:
    """Everything about one layer's chunks but the tensors."""

    make: Projections
    tree: pytree.TreeSpec
    chunks: tuple[Chunk, ...]
    group: int
    mask: Mask
    place: Ring
    kernel: Kernel
    mesh: MeshLike
    axis: str | None
    own_seq: tuple[int, ...]

    @property
    def me(self) -> int:
        return 0 if self.axis is None else coordinates(self.mesh)[self.axis]

    def queries(self, c: int, x: Tensor, weights: Any) -> Tensor:
        ranges = [(d.q_start, d.q_stop) for d in self.chunks[c].deals]
        return self._traded([self.make.q(x, weights, ranges)], ranges)[0]

    def fresh_keys(self, c: int, x: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
        ranges = self.chunks[c].fresh
        k, v = self._traded(list(self.make.kv(x, weights, ranges)), ranges)
        return k, v

    def _traded(self, made: list[Tensor], ranges: Sequence[Range]) -> list[Tensor]:
        if self.axis is None:
            return made
        at, places = 0, []
        for start, stop in ranges:  # where each rank's heads are in what was made
            places.append((at, at + stop - start))
            at += stop - start
        return trade([(t, places) for t in made], self.mesh, self.axis, self.own_seq)

    def comes(self, c: int) -> bool:
        """Whether some rank gets kv heads with this chunk: the same answer everywhere."""
        return any(stop > start for start, stop in self.chunks[c].fresh)

    def batches(self, c: int, rank: int) -> list[tuple[int, Range]]:
        """Which chunks brought a rank's kv heads of chunk c, and which of theirs they are: in order."""
        deal, found = self.chunks[c].deals[rank], []
        for j in range(c + 1):
            start, stop = self.chunks[j].fresh[rank]
            a, b = max(start, deal.kv_start), min(stop, deal.kv_stop)
            if a < b:
                found.append((j, (a - start, b - start)))
        return found

    def needed(self, c: int) -> list[int]:
        """Chunks whose kv heads some rank attends with in chunk c: the same answer everywhere."""
        ranks = range(len(self.chunks[c].deals))
        return sorted({j for rank in ranks for j, _ in self.batches(c, rank)})

    def keys(self, c: int, held: dict[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """This rank's k and v for chunk c out of what came."""
        parts = [[t[:, :, slice(*r)] for t in held[j]] for j, r in self.batches(c, self.me)]
        if not parts:  # no heads in this chunk
            k, v = (t[:, :, :0] for t in held[max(held)])
            return k, v
        k, v = (ts[0] if len(ts) == 1 else torch.cat(ts, 2) for ts in map(list, zip(*parts, strict=True)))
        return with_equal_groups(k, v, self.chunks[c].deals[self.me], self.group)

    def back(self, c: int, o: Tensor) -> Tensor:
        """[B, S, own heads, H] -> [B, S@axis, heads of chunk c of all ranks, H]."""
        if self.axis is None:
            return o
        counts = tuple(d.q_stop - d.q_start for d in self.chunks[c].deals)
        return trade_back(o, self.mesh, self.axis, counts, self.own_seq)

    def there(self, c: int, o: Tensor) -> Tensor:
        """The transpose of `back`."""
        counts = [(d.q_start, d.q_stop) for d in self.chunks[c].deals]
        return self._traded([o], counts)[0]

    def slots(self, c: int) -> list[tuple[Range, Range]]:
        """Ranges of heads in chunk c's result, and where they belong among all heads."""
        at, found = 0, []
        for d in self.chunks[c].deals:
            size = d.q_stop - d.q_start
            found.append(((at, at + size), (d.q_start, d.q_stop)))
            at += size
        return found


def chunked_attention(
    x: Tensor,
    weights: Any,
    make: Projections,
    *,
    num_heads: int,
    num_kv_heads: int,
    num_chunks: int,
    v_size: int,
    mask: Mask,
    place: Ring,
    kernel: Kernel,
    table: Table,
    mesh: MeshLike,
    seq_len: int,
    kept: Kept | None = None,
) -> Tensor:
    """x [B, S, D] at `table.attn_x` -> attention's output [B, S, N, Hv] placed likewise, chunk by chunk.

    Equal to `make`, `seq_to_heads`, `attention` and `heads_to_seq` one after the other. Each way over the
    axis that trades the sequence for heads: 1 all-to-all a chunk for q, 1 for each chunk that brings kv
    heads, 1 a chunk for the result; in the backward the first two twice. First derivatives in reverse mode
    only. Gradients of x and of `weights`, a pytree, are summed over chunks in float32 or wider.
    """
    axis = trading_axis(table, mesh)
    parts = 1 if axis is None else axis_sizes(mesh)[axis]
    leaves, tree = pytree.tree_flatten(weights)
    job = _Job(
        make=make,
        tree=tree,
        chunks=deal_chunks(num_heads, num_kv_heads, parts, num_chunks),
        group=num_heads // num_kv_heads,
        mask=mask,
        place=place,
        kernel=kernel,
        mesh=mesh,
        axis=axis,
        own_seq=() if axis is None else seq_lengths(table, mesh, axis, seq_len),
    )
    return cast(Tensor, _Chunked.apply(job, num_heads, v_size, kept, x, *leaves)[0])  # type: ignore[no-untyped-call]


class _Chunked(torch.autograd.Function):
    """Results: the output, then each chunk's output and log-sum-exp where attention ran."""

    @staticmethod
    def forward(
        job: _Job, num_heads: int, v_size: int, kept: Kept | None, x: Tensor, *leaves: Any
    ) -> tuple[Tensor, ...]:
        weights = pytree.tree_unflatten(list(leaves), job.tree)
        record = Kept() if kept is None else kept
        side = Side(x.device)
        out = x.new_empty(*x.shape[:2], num_heads, v_size)
        coming = None if record.replaying else _Coming(job, side, x, weights)
        saved: list[Tensor] = []
        for c in range(len(job.chunks)):

            def compute(c: int = c) -> tuple[Tensor, Tensor]:
                assert coming is not None
                return _attend(job, *coming.take(c))

            o, lse = record.get(compute)
            with side.run(o):
                y = job.back(c, o)  # [B, S, N@ulysses, H] -> [B, S@ulysses, N, H]: 1 all-to-all
                for (a, b), (start, stop) in job.slots(c):
                    out[:, :, start:stop] = y[:, :, a:b]
            saved += [o.detach(), lse.detach()]
        side.join(out)
        return (out, *saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.job, _, _, _, x, *leaves = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.present = [t is not None for t in leaves]
        ctx.num_saved = len(output) - 1
        ctx.save_for_backward(*output[1:], x, *(t for t in leaves if t is not None))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        saved, x, rest = tensors[: ctx.num_saved], tensors[ctx.num_saved], iter(tensors[ctx.num_saved + 1 :])
        leaves = [next(rest) if there else None for there in ctx.present]
        found = _ChunkedBackward.apply(ctx.job, ctx.num_saved, grads[0], *saved, x, *leaves)  # type: ignore[no-untyped-call]
        return None, None, None, None, *found


class _ChunkedBackward(torch.autograd.Function):
    """The backward as a forward, with plain autograd through the projections and the exchanges."""

    @staticmethod
    def forward(job: _Job, num_saved: int, d_out: Tensor, *tensors: Any) -> tuple[Tensor | None, ...]:
        saved, x, leaves = tensors[:num_saved], tensors[num_saved], tensors[num_saved + 1 :]
        side = Side(x.device)
        steps = _Backward(job, side, d_out, x, list(leaves))
        for c in reversed(range(len(job.chunks))):
            q, k, v, do = steps.take(c)
            o, lse = saved[2 * c : 2 * c + 2]
            grads: Sequence[Tensor] = [torch.zeros_like(t) for t in (q, k, v)]
            if q.shape[2]:
                flat = [t.flatten(0, 1) for t in (do, q, k, v, o)]
                grads = ring.backward(*flat, lse, job.mask, job.place, job.kernel)  # type: ignore[call-arg,arg-type]
            steps.give(c, [g.view(t.shape) for g, t in zip(grads, (q, k, v), strict=True)])
        return steps.result()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise RuntimeError("chunks of heads give first derivatives only. Use head_chunks=1 for higher ones.")


def _attend(job: _Job, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if q.shape[2] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(0, q.shape[0] * q.shape[1])
    o, lse = ring.forward(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), job.mask, job.place, job.kernel)
    return o.view(*q.shape[:3], v.shape[3]), lse


class _Coming:
    """q, k, v of one chunk after the other, each under way while the chunk before it is used."""

    def __init__(self, job: _Job, side: Side, x: Tensor, weights: Any) -> None:
        self.job, self.side, self.x, self.weights = job, side, x, weights
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.next = self._make(0)

    def _make(self, c: int) -> tuple[tuple[Tensor, Tensor, Tensor], Any]:
        with self.side.run(self.x):
            q = self.job.queries(c, self.x, self.weights)
            if self.job.comes(c):
                self.held[c] = self.job.fresh_keys(c, self.x, self.weights)
            k, v = self.job.keys(c, self.held)
            return (q, k, v), self.side.mark()

    def take(self, c: int) -> tuple[Tensor, Tensor, Tensor]:
        made, mark = self.next
        last = len(self.job.chunks) - 1
        if c < last:
            self.next = self._make(c + 1)
            needed = {j for later in range(c + 1, last + 1) for j in self.job.needed(later)}
            self.held = {j: kv for j, kv in self.held.items() if j in needed or j == max(self.held)}
        self.side.join(*made, mark=mark)
        return made


class _Backward:
    """Chunks in reverse: what attention's backward needs, made again one chunk ahead, and its gradients."""

    def __init__(self, job: _Job, side: Side, d_out: Tensor, x: Tensor, leaves: list[Any]) -> None:
        self.job, self.side, self.d_out = job, side, d_out
        self.x = x.detach().requires_grad_()
        self.leaves = [
            t.detach().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
            for t in leaves
        ]
        self.wrt = [self.x, *(t for t in self.leaves if isinstance(t, Tensor) and t.requires_grad)]
        self.sums: list[Tensor | None] = [None] * len(self.wrt)
        self.made: dict[int, tuple[Tensor, Tensor]] = {}  # kv heads with the graph that made them
        self.held: dict[int, tuple[Tensor, Tensor]] = {}  # the same without
        self.d_held: dict[int, list[Tensor]] = {}
        self.q: dict[int, Tensor] = {}
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}
        self.next = self._make(len(job.chunks) - 1)

    def _make(self, c: int) -> tuple[list[Tensor], Any]:
        weights = pytree.tree_unflatten(self.leaves, self.job.tree)
        with self.side.run(self.x, self.d_out), torch.enable_grad():
            self.q[c] = self.job.queries(c, self.x, weights)
            for j in self.job.needed(c):
                if j not in self.made:
                    self.made[j] = self.job.fresh_keys(j, self.x, weights)
                    k, v = (t.detach().requires_grad_() for t in self.made[j])
                    self.held[j] = k, v
            self.kv[c] = self.job.keys(c, self.held)
            parts = [self.d_out[:, :, start:stop] for _, (start, stop) in self.job.slots(c)]
            do = self.job.there(c, torch.cat(parts, 2).detach())
            return [t.detach() for t in (self.q[c], *self.kv[c], do)], self.side.mark()

    def take(self, c: int) -> list[Tensor]:
        made, mark = self.next
        if c:
            self.next = self._make(c - 1)
        self.side.join(*made, mark=mark)
        return made

    def give(self, c: int, grads: Sequence[Tensor]) -> None:
        """The gradients of what `take` returned but the last."""
        dq, *d_kv = grads
        with self.side.run(*grads):
            batches = [j for j, _ in self.job.batches(c, self.job.me)]
            if batches:
                inputs = [t for j in batches for t in self.held[j]]
                found = torch.autograd.grad(self.kv.pop(c), inputs, d_kv)
                for i, j in enumerate(batches):
                    self._add_held(j, found[2 * i : 2 * i + 2])
            self._add(torch.autograd.grad(self.q.pop(c), self.wrt, dq, allow_unused=True))
            if c in self.made:
                made = self.made.pop(c)
                whole = self.d_held.pop(c, None) or [torch.zeros_like(t) for t in made]
                d_made = [g.to(t.dtype) for g, t in zip(whole, made, strict=True)]
                self._add(torch.autograd.grad(made, self.wrt, d_made, allow_unused=True))
                del self.held[c]

    def _add_held(self, j: int, grads: Sequence[Tensor]) -> None:
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        if j not in self.d_held:
            self.d_held[j] = [g.to(wide) for g in grads]
            return
        for total, g in zip(self.d_held[j], grads, strict=True):
            total += g

    def _add(self, grads: Sequence[Tensor | None]) -> None:
        for i, g in enumerate(grads):
            if g is None:
                continue
            total = self.sums[i]
            if total is None:
                self.sums[i] = g.to(torch.promote_types(g.dtype, torch.float32), copy=True)
            else:
                total += g

    def result(self) -> tuple[Tensor | None, ...]:
        self.side.join(*(t for t in self.sums if t is not None))
        done = [None if s is None else s.to(t.dtype) for s, t in zip(self.sums, self.wrt, strict=True)]
        found = iter(done[1:])
        return done[0], *(
            next(found) if isinstance(t, Tensor) and t.requires_grad else None for t in self.leaves
        )
