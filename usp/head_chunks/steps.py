"""What is under way beside the attention of a chunk: the next one's heads coming, the last one's going back.

All is computed on the stream of the caller, in whose order its memory is made and let go. Only exchanges run
beside: at most those of two chunks, one whose heads come and one whose results go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from usp.head_chunks.job import Job
from usp.head_chunks.project import Gradients, Pieces, write
from usp.head_chunks.swap import Swap


@dataclass
class Under:
    """An exchange that was started, to be waited for; what is sent is held until then."""

    swap: Swap
    started: Tensor
    sent: Tensor | None

    def own(self) -> list[Tensor]:
        """[B, S, own heads, H] of each tensor."""
        return self.swap.own(self._wait())

    def blocks(self) -> list[list[Tensor]]:
        """[B, S@axis, heads, H] of each rank and tensor."""
        return self.swap.blocks(self._wait())

    def _wait(self) -> Tensor:
        came, self.sent = self.swap.wait(self.started), None
        return came


def start_made(job: Job, x: Tensor, weights: Any, c: int | None, j: int | None) -> list[Under]:
    """Make the query heads of chunk c and the kv heads that come with chunk j, and send both."""
    swaps = [*([] if c is None else [job.q_swap(c)]), *([] if j is None else [job.kv_swap(j)])]
    flats = [swap.empty(x) for swap in swaps]
    blocks = [swap.blocks(flat) for swap, flat in zip(swaps, flats, strict=True)]
    q = [] if c is None else [heads for (heads,) in blocks[0]]
    kv = [] if j is None else blocks[-1]
    pieces = Pieces(q, [k for k, _ in kv], [v for _, v in kv])
    write(job.make, x, weights, [] if c is None else job.q_ranges(c), _fresh(job, j), pieces)
    # [B, S@axis, N, H] -> [B, S, N@axis, H]: 1 all-to-all each
    return [Under(s, s.start_to_heads(flat), flat) for s, flat in zip(swaps, flats, strict=True)]


def start_back(swap: Swap, tensors: Sequence[Tensor]) -> Under:
    """[B, S, N@axis, H] -> [B, S@axis, N, H]: 1 all-to-all."""
    sent = swap.packed(tensors)
    return Under(swap, swap.start_to_tokens(sent), sent)


def _fresh(job: Job, j: int | None) -> Sequence[tuple[int, int]]:
    return () if j is None else job.chunks[j].fresh


class Coming:
    """q, k, v of one chunk after the other, each under way while the chunk before it is used."""

    def __init__(self, job: Job, x: Tensor, weights: Any) -> None:
        self.job, self.x, self.weights = job, x, weights
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.next = self._start(0)

    def _start(self, c: int) -> list[Under]:
        return start_made(self.job, self.x, self.weights, c, c if self.job.comes(c) else None)

    def take(self, c: int) -> tuple[Tensor, Tensor, Tensor]:
        (q,), *kv = (under.own() for under in self.next)
        if kv:
            k, v = kv[0]
            self.held[c] = k, v
        keys = self.job.keys(c, self.held)
        last = len(self.job.chunks) - 1
        needed = {j for later in range(c + 1, last + 1) for j in self.job.needed(later)}
        self.held = {j: kv for j, kv in self.held.items() if j in needed or j == max(self.held)}
        self.next = self._start(c + 1) if c < last else []
        return q, *keys


class Results:
    """Attention's output [B, S, N, Hv] for this rank's tokens, each chunk's on its way during the next."""

    def __init__(self, job: Job, out: Tensor) -> None:
        self.job, self.out = job, out
        self.last: tuple[int, Under] | None = None

    def add(self, c: int, o: Tensor) -> None:
        self.finish()
        self.last = c, start_back(self.job.o_swap(c), [o])

    def finish(self) -> None:
        if self.last is not None:
            c, under = self.last
            self.last = None
            for (heads,), (start, stop) in zip(under.blocks(), self.job.q_ranges(c), strict=True):
                self.out[:, :, start:stop] = heads


class _Next(NamedTuple):
    q: Under
    do: Under
    kv: dict[int, Under]
    """By the chunk that they came with forward."""


class Returning:
    """Chunks in reverse: what attention's backward needs, made again one chunk ahead, and its gradients."""

    def __init__(self, job: Job, d_z: Tensor, wo: Tensor, x: Tensor, leaves: list[Any]) -> None:
        self.job, self.d_z, self.wo, self.x = job, d_z, wo, x
        self.sums = Gradients(job.make, x, leaves, job.tree)
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.d_held: dict[int, Sequence[Tensor]] = {}
        self.kv: tuple[Tensor, Tensor] | None = None  # of the chunk at hand, as made of `held`
        self.last: tuple[int, Under, Under | None] | None = None
        self.next: _Next | None = self._start(len(job.chunks) - 1)

    def _start(self, c: int) -> _Next:
        """Send q and do of chunk c, and the kv heads that it needs and no later chunk has brought."""
        job, missing = self.job, [j for j in self.job.needed(c) if j not in self.held]
        first = missing[0] if missing else None
        q, *kv = start_made(job, self.x, self.sums.weights, c, first)
        others = [start_made(job, self.x, self.sums.weights, None, j)[0] for j in missing[1:]]
        return _Next(q, self._start_do(c), dict(zip(missing, [*kv, *others], strict=True)))

    def _start_do(self, c: int) -> Under:
        """The output's gradient of chunk c alone: what reached it through `wo`."""
        swap = self.job.o_swap(c)
        flat, size = swap.empty(self.d_z), self.job.v_size
        for (heads,), (start, stop) in zip(swap.blocks(flat), self.job.q_ranges(c), strict=True):
            do = self.d_z @ self.wo[:, start * size : stop * size]
            heads.copy_(do.view(*do.shape[:2], stop - start, size))
        return Under(swap, swap.start_to_heads(flat), flat)

    def take(self, c: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """do, q, k, v of chunk c; then the next one is under way."""
        assert self.next is not None
        (q,), (do,) = self.next.q.own(), self.next.do.own()
        for j, under in self.next.kv.items():
            k, v = (t.detach().requires_grad_() for t in under.own())
            self.held[j] = k, v
        with torch.enable_grad():
            self.kv = self.job.keys(c, self.held)
        self.next = self._start(c - 1) if c else None
        k, v = (t.detach() for t in self.kv)
        return do, q, k, v

    def give(self, c: int, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """The gradients of what `take` returned: sent home, those of the chunk before are added meanwhile."""
        job, batches = self.job, [j for j, _ in self.job.batches(c)]
        if batches and self.kv is not None:
            found = torch.autograd.grad(self.kv, [t for j in batches for t in self.held[j]], (dk, dv))
            for i, j in enumerate(batches):
                self._add_held(j, found[2 * i : 2 * i + 2])
        self.kv = None
        self.finish()
        back = start_back(job.q_swap(c), [dq])
        kv_back = None
        if job.comes(c):
            made = self.held.pop(c)
            whole = self.d_held.pop(c, None) or [torch.zeros_like(t) for t in made]
            kv_back = start_back(job.kv_swap(c), [g.to(t.dtype) for g, t in zip(whole, made, strict=True)])
        self.last = c, back, kv_back

    def _add_held(self, j: int, grads: Sequence[Tensor]) -> None:
        """Kv heads that several chunks attend with: summed in float32 or wider."""
        if j not in self.d_held:
            self.d_held[j] = grads
            return
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        self.d_held[j] = [total.to(wide) + g for total, g in zip(self.d_held[j], grads, strict=True)]

    def finish(self) -> None:
        """Add what the gradients that are under way give x and the weights."""
        if self.last is None:
            return
        c, back, kv_back = self.last
        self.last = None
        kv = [] if kv_back is None else kv_back.blocks()
        pieces = Pieces([heads for (heads,) in back.blocks()], [k for k, _ in kv], [v for _, v in kv])
        self.sums.add(self.job.q_ranges(c), _fresh(self.job, c) if kv else (), pieces)

    def result(self) -> tuple[Tensor | None, ...]:
        self.finish()
        dx, found = self.sums.result()
        return dx, *found
