"""From the residual to q, k and v: norm, projection, rotation; all heads, or those that a chunk asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from usp import kernels
from usp.attention import mask_of, ring_of
from usp.head_chunks import Projections, Range, chunked_attention
from usp.kept import Kept
from usp.mesh import Table, axis_sizes
from usp.models.config import LlamaConfig
from usp.models.params import Block, Mesh
from usp.models.rope import rope
from usp.spans import features


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Normalised in float32 (float64 stays float64), scaled after the cast back, as Transformers does."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def queries(
    x_BSD: Tensor, w: Block, cos: Tensor, sin: Tensor, cfg: LlamaConfig, heads: Sequence[Range] | None = None
) -> Tensor:
    """[B, S, D] -> [B, S, N, H], rotated; `heads`: ranges of the wanted ones."""
    q_BSNH = _project(x_BSD, w.wq, w.bq, cfg.head_dim, heads)
    if cfg.qk_norm:
        q_BSNH = rms_norm(q_BSNH, w.q_norm, eps=cfg.rms_eps)
    return rope(q_BSNH, cos, sin)


def keys_values(
    x_BSD: Tensor, w: Block, cos: Tensor, sin: Tensor, cfg: LlamaConfig, heads: Sequence[Range] | None = None
) -> tuple[Tensor, Tensor]:
    """[B, S, D] -> k, v [B, S, K, H], k rotated; `heads`: ranges of the wanted ones."""
    k_BSKH = _project(x_BSD, w.wk, w.bk, cfg.head_dim, heads)
    v_BSKH = _project(x_BSD, w.wv, w.bv, cfg.head_dim, heads)
    if cfg.qk_norm:
        k_BSKH = rms_norm(k_BSKH, w.k_norm, eps=cfg.rms_eps)
    return rope(k_BSKH, cos, sin), v_BSKH


def _project(
    x: Tensor, weight: Tensor, bias: Tensor | None, head_dim: int, heads: Sequence[Range] | None
) -> Tensor:
    if heads is not None:
        weight = _rows(weight, heads, head_dim)
        bias = None if bias is None else _rows(bias, heads, head_dim)
    y = F.linear(x, weight, bias)
    return y.view(*y.shape[:-1], y.shape[-1] // head_dim, head_dim)


def _rows(t: Tensor, heads: Sequence[Range], head_dim: int) -> Tensor:
    parts = [t[start * head_dim : stop * head_dim] for start, stop in heads]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def by_chunks(
    x_BSD: Tensor,
    w: Block,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    *,
    cfg: LlamaConfig,
    table: Table,
    mesh: Mesh,
    seq_len: int,
    window: int | None,
    kernel: str,
    head_chunks: int,
    kept: Kept | None,
) -> Tensor:
    """Normed x at table.attn_x -> attention's output [B, S, N, H], likewise, `head_chunks` parts of heads."""
    sizes = axis_sizes(mesh)
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
        return queries(x, leaves, cos, sin, cfg, heads)

    def kv(x: Tensor, leaves: Block, heads: Sequence[Range]) -> tuple[Tensor, Tensor]:
        return keys_values(x, leaves, cos, sin, cfg, heads)

    unused = dict.fromkeys(
        ("norm_attn", "wo", "norm_mlp", "w_gate", "w_up", "w_down", "bo", "b_gate", "b_up", "b_down")
    )
    return chunked_attention(
        x_BSD, w._replace(**unused), Projections(q, kv),
        num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, num_chunks=head_chunks, v_size=cfg.head_dim,
        mask=mask, place=place, kernel=chosen, table=table, mesh=mesh, seq_len=seq_len, kept=kept,
    )  # fmt: skip
