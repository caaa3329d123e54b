"""Attention of a layer by chunks of heads: `usp.head_chunks` with this model's projections."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from usp import kernels
from usp.head_chunks import Projections, Range, chunked_attention
from usp.kept import Kept
from usp.mesh import Table, axis_sizes
from usp.models.config import LlamaConfig
from usp.models.params import Block, Mesh
from usp.models.parts import Parts, head_rows
from usp.setting import mask_of, ring_of
from usp.spans import features

_UNUSED = ("norm_attn", "wo", "norm_mlp", "w_gate", "w_up", "w_down", "bo", "b_gate", "b_up", "b_down")


def by_chunks(
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
    kept: Kept | None,
) -> Tensor:
    """Normed x at table.attn_x -> attention's output [B, S, N, H], likewise, in `head_chunks` parts."""
    sizes, seq_len = axis_sizes(mesh), shape[1]
    # tokens of a row where attention runs: a ring's part of the whole
    length = seq_len // math.prod(sizes[a] for a in table.q[1])
    place = ring_of(length, cfg.num_heads, cfg.num_kv_heads, table, mesh, "auto")
    mask = mask_of(
        x_BSD.shape[0], seq_len, place.degree,
        cu_seqlens=cu_seqlens, window=window, scale=1 / math.sqrt(cfg.head_dim),
    )  # fmt: skip
    chosen = kernels.choose(
        kernel, device=x_BSD.device, dtype=x_BSD.dtype, size=cfg.head_dim, v_size=cfg.head_dim,
        features=features(mask),
    )  # fmt: skip

    def q(x: Tensor, leaves: Block, heads: Sequence[Range]) -> Tensor:
        return parts.q(x, head_rows(leaves, heads, (), cfg.head_dim), *rope)

    def kv(x: Tensor, leaves: Block, heads: Sequence[Range]) -> tuple[Tensor, Tensor]:
        return parts.kv(x, head_rows(leaves, (), heads, cfg.head_dim), *rope)

    return chunked_attention(
        x_BSD, w._replace(**dict.fromkeys(_UNUSED)), Projections(q, kv),
        num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, num_chunks=head_chunks, v_size=cfg.head_dim,
        mask=mask, place=place, kernel=chosen, table=table, mesh=mesh, seq_len=seq_len, kept=kept,
    )  # fmt: skip
