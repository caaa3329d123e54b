"""What runs beside the attention of a chunk: the next one made, the last one's gradients taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from usp.head_chunks.job import Job
from usp.side import Side


class Coming:
    """q, k, v of one chunk after the other, each under way while the chunk before it is used."""

    def __init__(self, job: Job, side: Side, x: Tensor, weights: Any) -> None:
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


class Returning:
    """Chunks in reverse: what attention's backward needs, made again one chunk ahead, and its gradients."""

    def __init__(self, job: Job, side: Side, d_out: Tensor, x: Tensor, leaves: list[Any]) -> None:
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
