"""Attention of a layer by chunks of heads: `usp.head_chunks` with this model's projections."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from torch import Tensor

from usp import kernels
from usp.head_chunks import Projections, Range, chunked_attention
from usp.heads import trading_axis
from usp.kept import Kept
from usp.mesh import P, Table, axis_sizes, redistribute
from usp.models.attended import ring_heads
from usp.models.config import LlamaConfig
from usp.models.layout import linear_out
from usp.models.params import Block, Mesh
from usp.models.parts import Parts, rms_norm
from usp.models.rope import rope as rope_of
from usp.programs import own_programs
from usp.setting import mask_of, ring_of
from usp.spans import features
from usp.wire import can_wire, turned

_UNUSED = ("wo", "norm_mlp", "w_gate", "w_up", "w_down", "bo", "b_gate", "b_up", "b_down")


def add_by_chunks(
    x_BSD: Tensor,
    w: Block,
    rope: tuple[Tensor, Tensor],
    cu_seqlens: Tensor | None,
    parts: Parts,
    *,
    cfg: LlamaConfig,
    table: Table,
    mesh: Mesh,
    shape: tuple[int, int, int],
    window: int | None,
    kernel: str,
    head_chunks: int,
    compiled: bool,
    kept: Kept | None,
) -> Tensor:
    """x at table.residual plus the attention of its norm, taken in `head_chunks` parts.

    Where attention is placed as the residual is, its chunks read x itself: no norm of it is kept.
    """
    plus = x_BSD if w.bo is None else x_BSD + w.bo
    spec: P = linear_out(linear_out(table.attn_x, table.use["wq"]), table.use["wo"])
    local = table.residual == table.attn_x
    if local:
        h_BSD = x_BSD
    else:
        h_BSD = redistribute(parts.norm(x_BSD, w.norm_attn), table.residual, table.attn_x, mesh, shape=shape)
    sizes, seq_len = axis_sizes(mesh), shape[1]
    # tokens of a row where attention runs: a ring's part of the whole
    length = seq_len // math.prod(sizes[a] for a in table.q[1])
    axis = trading_axis(table, sizes)
    heads = ring_heads(cfg.num_heads, cfg.num_kv_heads, 1 if axis is None else sizes[axis], head_chunks)
    place = ring_of(length, heads.q, heads.kv, table, mesh, "auto")
    mask = mask_of(
        h_BSD.shape[0], seq_len, place.degree,
        cu_seqlens=cu_seqlens, window=window, scale=1 / math.sqrt(cfg.head_dim),
    )  # fmt: skip
    chosen = kernels.choose(
        kernel, device=h_BSD.device, dtype=h_BSD.dtype, size=cfg.head_dim, v_size=cfg.head_dim,
        features=features(mask),
    )  # fmt: skip
    weights = w._replace(**dict.fromkeys(_UNUSED if local else ("norm_attn", *_UNUSED)))
    added = spec == table.residual
    z_BSD = chunked_attention(
        h_BSD, weights, w.wo, _projections(parts, cfg, rope, local=local, compiled=compiled),
        num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, num_chunks=head_chunks,
        size=cfg.head_dim, v_size=cfg.head_dim, mask=mask, place=place, kernel=chosen, table=table, mesh=mesh,
        seq_len=seq_len, kept=kept, plus=plus if added else None,
    )  # fmt: skip
    return z_BSD if added else plus + redistribute(z_BSD, spec, table.residual, mesh, shape=shape)


def _projections(
    parts: Parts, cfg: LlamaConfig, rope: tuple[Tensor, Tensor], *, local: bool, compiled: bool
) -> Projections:
    turn = _turn(cfg, compiled)

    def norm(x: Tensor, w: Block) -> Tensor:
        return parts.norm(x, w.norm_attn)

    def rows(w: Block, q: Sequence[Range], kv: Sequence[Range]) -> tuple[list[Tensor], list[Tensor]]:
        def of(matrices: Sequence[Tensor | None]) -> list[Tensor]:
            return [
                t[start * cfg.head_dim : stop * cfg.head_dim]
                for t, ranges in zip(matrices, (q, kv, kv), strict=True)
                for start, stop in ranges
                if t is not None
            ]

        return of((w.wq, w.wk, w.wv)), of((w.bq, w.bk, w.bv))

    def turn_q(y: Tensor, w: Block, tokens: slice) -> Tensor:
        return turn(y, w.q_norm, *(t[:, tokens] for t in rope))

    def turn_k(y: Tensor, w: Block, tokens: slice) -> Tensor:
        return turn(y, w.k_norm, *(t[:, tokens] for t in rope))

    return Projections(norm if local else None, rows, turn_q, turn_k, reads=cfg.qk_norm)


@lru_cache(maxsize=16)
def _turn(cfg: LlamaConfig, compiled: bool) -> Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor]:
    """Projected heads [B, S, N, H] normed, where the model does that, and rotated."""

    def norm(y: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(y, weight, eps=cfg.rms_eps)

    # of any size from the start: chunks and tiles have many
    norm_of_heads = own_programs(norm, dynamic=True) if compiled else norm

    def turn(y: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        if weight is not None:
            y = norm_of_heads(y.contiguous(), weight)
        return turned(y, cos, sin) if can_wire(y) else rope_of(y, cos, sin)

    return turn
