"""One exchange of a chunk, started and waited for apart: tokens of all heads against heads of all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from usp.mesh import collectives


@dataclass(frozen=True)
class Swap:
    """Heads of one or two tensors, `counts` of each rank, between this rank's tokens and its heads.

    Both sides are flat: `blocks` sees the side that holds this rank's tokens, as [B, S@axis, heads, H] of
    every rank and tensor; `own` the side that holds this rank's heads, as [B, S, heads, H] of every tensor.
    What is sent is written there and what arrives is read there, so nothing is packed or unpacked whole. One
    rank without a group sends nothing, and both sides are the same memory.
    """

    group: str | None
    me: int
    rows: int
    own_seq: tuple[int, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]

    def empty(self, like: Tensor) -> Tensor:
        """The side of this rank's tokens, to be written to."""
        return like.new_empty(sum(self._of_tokens()))

    def blocks(self, flat: Tensor) -> list[list[Tensor]]:
        parts = torch.split(flat, self._of_tokens())
        return [self._seen(p, self.own_seq[self.me], n) for p, n in zip(parts, self.counts, strict=True)]

    def own(self, flat: Tensor) -> list[Tensor]:
        return self._seen(flat, sum(self.own_seq), self.counts[self.me])

    def packed(self, tensors: Sequence[Tensor]) -> Tensor:
        """Side of this rank's heads, out of [B, S, heads, H]: no copy of one contiguous tensor of 1 row."""
        flat = [t.transpose(0, 1).flatten(2) for t in tensors]
        return (flat[0] if len(flat) == 1 else torch.cat(flat, 2)).reshape(-1)

    def start_to_heads(self, flat: Tensor) -> Tensor:
        if self.group is None:
            return flat
        return collectives.start_exchange(flat, self.group, self._of_tokens(), self._of_heads())

    def start_to_tokens(self, flat: Tensor) -> Tensor:
        if self.group is None:
            return flat
        return collectives.start_exchange(flat, self.group, self._of_heads(), self._of_tokens())

    def wait(self, started: Tensor) -> Tensor:
        return started if self.group is None else collectives.wait(started)

    def _of_tokens(self) -> list[int]:
        return [self.own_seq[self.me] * self.rows * n * sum(self.sizes) for n in self.counts]

    def _of_heads(self) -> list[int]:
        return [n * self.rows * self.counts[self.me] * sum(self.sizes) for n in self.own_seq]

    def _seen(self, flat: Tensor, tokens: int, heads: int) -> list[Tensor]:
        whole = flat.view(tokens, self.rows, heads * sum(self.sizes))
        parts = torch.split(whole, [heads * size for size in self.sizes], 2)
        return [
            p.view(tokens, self.rows, heads, size).transpose(0, 1)
            for p, size in zip(parts, self.sizes, strict=True)
        ]
