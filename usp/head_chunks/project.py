"""q, k and v of some heads, made of x and taken back to it a tile of tokens at a time.

Neither the normed x, nor a product of all tokens before it is rotated, nor a gradient of x beside the one
that is summed ever exists whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from usp.head_chunks.deal import Range
from usp.products import add_product

TILES, LEAST = 16, 4096  # of a row: so many tiles at most, and no more than hold so many tokens

Views = tuple[Sequence[Tensor], Sequence[Tensor]]
Turn = Callable[[Tensor, Any, slice], Tensor]


class Projections(NamedTuple):
    """How heads are made of x [B, S, D] placed as `table.attn_x`, every token for itself.

    All take `weights`, the pytree of tensors given to `chunked_attention`, or one like it; none communicates.
    """

    norm: Callable[[Tensor, Any], Tensor] | None
    """[B, S, D] -> what is projected; None where x is that already."""
    rows: Callable[[Any, Sequence[Range], Sequence[Range]], Views]
    """Views of the weights, and of the biases if there are any, which laid end to end make the given ranges
    of query heads, then those of k, then of v."""
    turn_q: Turn
    """Projected q [B, S, N', H] of the tokens in a slice of S -> the q to attend with."""
    turn_k: Turn
    reads: bool
    """Whether gradients through `turn_q` and `turn_k` depend on what is turned: a rotation's do not."""


class Pieces(NamedTuple):
    """[B, S, heads, H] of every rank, side by side as a projection makes them: written to, or read."""

    q: Sequence[Tensor]
    k: Sequence[Tensor]
    v: Sequence[Tensor]

    def widths(self) -> list[int]:
        return [sum(t.shape[2] * t.shape[3] for t in ts) for ts in self]

    def tile(self, part: slice) -> Pieces:
        return Pieces(*([t[:, part] for t in ts] for ts in self))


def num_tiles(length: int) -> int:
    """Depends on the length alone, and takes a share of the memory that does not."""
    return min(TILES, max(1, -(-length // LEAST)))


def tiles(length: int) -> Iterator[slice]:
    step = max(1, -(-length // num_tiles(length)))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def write(
    make: Projections, x: Tensor, weights: Any, q: Sequence[Range], kv: Sequence[Range], out: Pieces
) -> None:
    """Fill `out` with the given ranges of heads."""
    weight, bias = (_joined(views) for views in make.rows(weights, q, kv))
    assert weight is not None
    for part in tiles(x.shape[1]):
        h = x[:, part] if make.norm is None else make.norm(x[:, part], weights)
        made = _turned(make, F.linear(h, weight, bias), weights, part, out)
        for heads, places in zip(made, out.tile(part), strict=True):
            if places:
                for piece, place in zip(_apart(heads, places), places, strict=True):
                    place.copy_(piece)


class Gradients:
    """Gradients of x and of weights, summed as chunks give theirs.

    x's is summed in its own type: the product adds to it unrounded and rounds once a chunk, where all heads
    at once round the products of q, k and v and both their sums. A float32 sum would take twice as much as x.
    Those of weights are summed in float32 or wider.
    """

    def __init__(self, make: Projections, x: Tensor, leaves: Sequence[Any], tree: pytree.TreeSpec) -> None:
        self.make, self.x, self.leaves, self.tree = make, x, list(leaves), tree
        self.at = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()]
        self.dx = torch.zeros_like(x, memory_format=torch.contiguous_format)
        self.sums = list(leaves)
        for i in self.at:
            self.sums[i] = torch.zeros_like(leaves[i], dtype=_wide(leaves[i]))

    @property
    def weights(self) -> Any:
        return pytree.tree_unflatten(self.leaves, self.tree)

    def add(self, q: Sequence[Range], kv: Sequence[Range], grads: Pieces) -> None:
        """Gradients of what `write` made of these ranges."""
        weight, bias = (_joined(views) for views in self.make.rows(self.weights, q, kv))
        assert weight is not None
        d_weight: Tensor | None = None
        d_bias = None if bias is None else bias.new_zeros(bias.shape, dtype=_wide(bias))
        for part in tiles(self.x.shape[1]):
            h = self._normed(part)
            dy = self._through_turns(h, weight, bias, part, grads)
            for row in range(h.shape[0]):
                self.dx[row, part].addmm_(dy[row], weight)
            d_weight = add_product(d_weight, dy.flatten(0, 1).T, h.flatten(0, 1))
            if d_bias is not None:
                d_bias += dy.sum((0, 1), dtype=d_bias.dtype)
        sums = self.make.rows(pytree.tree_unflatten(self.sums, self.tree), q, kv)
        for views, whole in zip(sums, (d_weight, d_bias), strict=True):
            if whole is not None:
                for view, g in zip(views, torch.split(whole, [len(v) for v in views]), strict=True):
                    view += g

    def result(self) -> tuple[Tensor, list[Tensor | None]]:
        """The gradient of x, the norm's part in it now too, and those of the leaves."""
        if self.make.norm is not None:
            for part in tiles(self.x.shape[1]):
                with torch.enable_grad():
                    x, leaves = self.x[:, part].detach().requires_grad_(), self._tracked()
                    h = self.make.norm(x, pytree.tree_unflatten(leaves, self.tree))
                self.dx[:, part] = self._into_leaves([h], x, leaves, [self.dx[:, part]])
        done: list[Tensor | None] = [None] * len(self.leaves)
        for i in self.at:
            done[i] = self.sums[i].to(self.leaves[i].dtype)
        return self.dx, done

    def _normed(self, part: slice) -> Tensor:
        x = self.x[:, part]
        return x if self.make.norm is None else self.make.norm(x, self.weights)

    def _tracked(self) -> list[Any]:
        return [t.detach().requires_grad_() if i in self.at else t for i, t in enumerate(self.leaves)]

    def _through_turns(
        self, h: Tensor, weight: Tensor, bias: Tensor | None, part: slice, grads: Pieces
    ) -> Tensor:
        """Gradient of the projection: of the turned heads, through what turned them."""
        like = F.linear(h, weight, bias) if self.make.reads else h.new_empty(*h.shape[:2], weight.shape[0])
        own = grads.tile(part)
        d_q, d_k, d_v = ([torch.cat(list(ts), 2)] if ts else [] for ts in own)
        with torch.enable_grad():
            y, leaves = like.requires_grad_(), self._tracked()
            made = _turned(self.make, y, pytree.tree_unflatten(leaves, self.tree), part, grads)
        return self._into_leaves([t for t in made if t is not None], y, leaves, [*d_q, *d_k, *d_v])

    def _into_leaves(
        self, made: list[Tensor], of: Tensor, leaves: list[Any], grads: Sequence[Tensor]
    ) -> Tensor:
        """The gradient of `of`, those of the leaves added to the sums."""
        wrt = [of, *(leaves[i] for i in self.at)]
        found, *others = torch.autograd.grad(made, wrt, grads, allow_unused=True)
        for i, g in zip(self.at, others, strict=True):
            if g is not None:
                self.sums[i] += g
        assert found is not None
        return found


def _turned(
    make: Projections, y: Tensor, weights: Any, part: slice, like: Pieces
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The projection y [B, S, rows] as heads q, k, v to attend with; None for those it does not hold."""
    q, k, v = torch.split(y, like.widths(), 2)
    return (
        make.turn_q(_as_heads(q, like.q), weights, part) if like.q else None,
        make.turn_k(_as_heads(k, like.k), weights, part) if like.k else None,
        _as_heads(v, like.v) if like.v else None,
    )


def _as_heads(y: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    size = pieces[0].shape[3]
    return y.view(*y.shape[:2], y.shape[2] // size, size)


def _apart(heads: Tensor | None, pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
    assert heads is not None
    return torch.split(heads, [t.shape[2] for t in pieces], 2)


def _joined(views: Sequence[Tensor]) -> Tensor | None:
    if not views:
        return None
    return views[0] if len(views) == 1 else torch.cat(list(views))


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)
