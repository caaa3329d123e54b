"""Bytes of one layer's tensors on one rank: what is kept of it, and what lives while its gradient is made.

Read off the code of `usp.models.block` and what it calls; `wide` is the size of a float32 in units of the
type that computes. Eager, a norm holds its input in float32, the rounded copy and the result; compiled, its
input and the result. An MLP's backward holds, of [tokens, F], gate, silu, up and the gradients of the last
three; compiled, gate, up and two gradients, written over what is no longer read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from usp.head_chunks.project import num_tiles
from usp.models.plan.local import Local
from usp.models.plan.memory_chunks import chunks_moment, weights_sums

MLP_LEAVES = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    where: Local
    dtype: torch.dtype
    compiled: bool = False
    mlp_tile: int | None = None
    head_chunks: int = 1

    @property
    def item(self) -> int:
        return self.dtype.itemsize

    @property
    def wide(self) -> int:
        return max(self.item, 4) // self.item

    @cached_property
    def x(self) -> int:
        """[B, S, D] at table.residual."""
        return self.where.tokens(self.where.table.residual) * self.where.cfg.hidden_size * self.item

    @property
    def attn_x(self) -> int:
        return self.where.tokens(self.where.table.attn_x) * self.where.cfg.hidden_size * self.item

    @property
    def mlp_x(self) -> int:
        return self.where.tokens(self.where.table.mlp_x) * self.where.cfg.hidden_size * self.item

    @cached_property
    def features(self) -> int:
        """[B, S, F] as the MLP has it."""
        where = self.where
        cut = math.prod(where.sizes[a] for a in where.table.use["w_gate"][0])
        size = -(-where.cfg.intermediate_size // cut)
        return where.tokens(where.table.mlp_x) * size * self.item

    @property
    def repacked(self) -> bool:
        """Whether x is copied on its way to attention and back: rows of a gathered sequence come in parts."""
        return self.where.rows > 1

    def _of_heads(self, tokens: int, heads: int) -> int:
        return tokens * heads * self.where.cfg.head_dim * self.item

    @property
    def q(self) -> int:
        """q, and attention's output, where attention runs."""
        return self._of_heads(self.where.tokens(self.where.table.q), self.where.heads.q)

    @property
    def kv(self) -> int:
        """k and v there."""
        return self._of_heads(self.where.tokens(self.where.table.q), 2 * self.where.heads.kv)

    @property
    def out(self) -> int:
        """Attention's output where `wo` is applied."""
        where = self.where
        heads = where.cfg.num_heads if where.axis is not None else where.heads.q
        return self._of_heads(where.tokens(where.table.attn_x), heads)

    @property
    def lse(self) -> int:
        return self.where.tokens(self.where.table.q) * self.where.heads.q * max(4, self.item)

    @cached_property
    def norm(self) -> int:
        """What a norm leaves for its backward beside its input, its result included."""
        if self.compiled:
            return self.x
        return (self.wide + 2 if self.wide > 1 else 2) * self.x

    @property
    def results(self) -> int:
        """Attention's, as `usp.kept` records them."""
        return self.q + self.lse

    @cached_property
    def attention_saved(self) -> int:
        """Of norm, projections and attention for the backward, without the kept results and the input."""
        gathered = (1 + self.repacked) * self.attn_x if self.attn_x != self.x else 0
        back = self.out if self.where.axis is not None or self.head_chunks > 1 else 0
        if self.head_chunks > 1:
            return back + (0 if self.chunks_norm else self.norm + gathered)
        rotated = (self.wide + 1) * (self.q + self.kv // 2) if self.where.cfg.qk_norm else 0
        return self.norm + gathered + self.q + self.kv + rotated + back

    @cached_property
    def mlp_saved(self) -> int:
        gathered = self.mlp_x if self.mlp_x != self.x else 0
        before = self.x if self.compiled or self.wide == 1 else 0  # the norm's input
        if self.tiled_whole:
            return self.x
        if self.mlp_tile is not None:
            return before + self.norm + gathered
        return before + self.norm + gathered + (3 if self.compiled else 4) * self.features

    @property
    def chunks_norm(self) -> bool:
        """Whether chunks of heads norm x themselves, tile by tile: they read it as it is placed."""
        return self.head_chunks > 1 and self.where.table.residual == self.where.table.attn_x

    @property
    def tiled_whole(self) -> bool:
        """Whether a tile holds the norm and the sum too: nothing moves between them and the MLP."""
        return self.mlp_tile is not None and self.where.table.residual == self.where.table.mlp_x

    @property
    def saved(self) -> int:
        """All of a layer that is not run again, its input and its weights aside."""
        return self.attention_saved + self.results + self.mlp_saved + self.x

    def mlp_moment(self, *, again: bool, last: bool) -> int:
        """While the MLP's gradient is made: beside the input, kept results and weights in use.

        `again`: whether the layer is run again for it; then its value is not made a second time, and, but for
        the `last` layer's, the gradient of a result is the scan's own and is written over where tiles are.
        """
        held = self.attention_saved + (1 if again else 2) * self.x
        if self.mlp_tile is None:
            return held + self.mlp_saved + (1 if self.compiled else 2) * self.features
        tokens = max(self.where.tokens(self.where.table.mlp_x), 1)
        tile = (4 if self.compiled else 6) * self.features * min(self.mlp_tile, tokens) // tokens
        sums = 3 * self.features // tokens * self.where.cfg.hidden_size  # gradients of the weights
        made = 0 if self.tiled_whole and again and not last else self.mlp_x
        return held + self.mlp_saved + made + tile + sums * (1 + self.wide)

    def norm_moment(self, *, again: bool) -> int:
        """While the gradient of the MLP's norm is made, pass by pass in float32; none where tiles are."""
        if self.tiled_whole:
            return 0
        held = self.attention_saved + (1 if again else 2) * self.x
        return held + (3 * self.x if self.compiled else 6 * self.wide * self.x)

    def attention_moment(self) -> int:
        """While attention's gradient is made: gradients in and out, the kernel's float32 sums, the ring's."""
        back = self.out if self.where.axis is not None or self.head_chunks > 1 else 0
        held, heads = self.attention_saved - back + self.x, self.q + self.kv
        if self.head_chunks > 1:
            chunks = chunks_moment(self.where, self.head_chunks, self.item, self.wide, self._ring)
            # at the end the norm's gradient, a tile at a time
            last = num_tiles(self.where.length(self.where.table.attn_x))
            normed = (3 if self.compiled else 6 * self.wide) * self.x // last if self.chunks_norm else 0
            return held + self.attn_x + max(chunks, normed) + weights_sums(self.where, self.item, self.wide)
        # with several rows three more, by the count of what lives in the step itself (tests/models/plan)
        moved = (self.wide + 3 * self.repacked) * (self.attn_x if self.attn_x != self.x else 0)
        return held + moved + self.q + heads + self.wide * heads + self._ring(self.q, self.kv)

    def input_moment(self) -> int:
        """While the gradient of attention's norm is made: nothing else of the layer but its input is left."""
        if self.chunks_norm:
            return 2 * self.x
        return self.x + (3 * self.x if self.compiled else 6 * self.wide * self.x)

    def _ring(self, q: int, kv: int) -> int:
        degree, wide = self.where.degree, self.wide
        if degree == 1:
            return 0
        if self.where.gathers(self.head_chunks):
            return kv * (degree * (1 + wide) + wide) + wide * q
        return kv * (2 + 3 * wide) + wide * q
