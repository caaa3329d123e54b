"""The Llama family as pure functions of a parameter tree and one rank's shard of a batch.

Dimension letters: B batch, S sequence, D model, N query heads, K kv heads, H head size, F feed-forward,
V vocabulary. Where things live is read from the table alone; with a mesh of ones nothing communicates.
"""

from __future__ import annotations

from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from usp import Shard, attention, heads_to_seq, linear_cross_entropy, scan, seq_to_heads
from usp.heads import with_equal_groups
from usp.mesh import P, Table, axis_sizes, redistribute
from usp.models.config import LlamaConfig
from usp.models.layout import check_layout, linear_out
from usp.models.own_heads import own_heads, use_spec
from usp.models.params import Block, Leaf, Mesh, Params, abstract, spec_of
from usp.models.rope import rope, rope_cos_sin


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Normalised in float32 (float64 stays float64), scaled after the cast back, as Transformers does."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def use_leaf(value: Tensor, name: str, leaf: Leaf, table: Table, mesh: Mesh) -> Tensor:
    """One parameter from rest to use; its gradient is reduced on the way back."""
    rest = spec_of(table.rest, name, leaf, table=table.name)
    use = spec_of(table.use, name, leaf, table=table.name)
    # [out@rest, in] -> [out@use, in]: 1 all-gather, 1 reduce-scatter backward; none where both are equal
    return redistribute(value, rest, use, mesh, shape=leaf.shape)


def in_use(layer: Block, cfg: LlamaConfig, table: Table, mesh: Mesh) -> Block:
    """All parameters of a layer from rest to use: what a scheduler would replace by one collective."""
    moved = []
    for name, value, leaf in zip(Block._fields, layer, abstract(cfg).layers[0], strict=True):
        if value is not None:
            rest = spec_of(table.rest, name, leaf, table=table.name)
            value = redistribute(value, rest, use_spec(cfg, table, mesh, name), mesh, shape=leaf.shape)
        moved.append(value)
    return Block(*moved)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, head_dim: int) -> Tensor:
    y = F.linear(x, weight, bias)
    return y.view(*y.shape[:-1], -1, head_dim)


def attention_part(
    x_BSD: Tensor,
    w: Block,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    *,
    cfg: LlamaConfig,
    table: Table,
    mesh: Mesh,
    shape: tuple[int, int, int],
) -> Tensor:
    """x at table.residual -> attention's contribution to it, same placement. 2 all-to-alls each way."""
    w, deal = own_heads(w, cfg, table, mesh)
    x_BSD = rms_norm(x_BSD, w.norm_attn, eps=cfg.rms_eps)
    x_BSD = redistribute(x_BSD, table.residual, table.attn_x, mesh, shape=shape)  # residual -> attn_x
    q_BSNH = _project(x_BSD, w.wq, w.bq, cfg.head_dim)
    k_BSKH = _project(x_BSD, w.wk, w.bk, cfg.head_dim)
    v_BSKH = _project(x_BSD, w.wv, w.bv, cfg.head_dim)
    if cfg.qk_norm:
        q_BSNH = rms_norm(q_BSNH, w.q_norm, eps=cfg.rms_eps)
        k_BSKH = rms_norm(k_BSKH, w.k_norm, eps=cfg.rms_eps)
    q_BSNH, k_BSKH = rope(q_BSNH, cos, sin), rope(k_BSKH, cos, sin)
    if deal is not None:
        k_BSKH, v_BSKH = with_equal_groups(k_BSKH, v_BSKH, deal, cfg.num_heads // cfg.num_kv_heads)
    # [B, S@ulysses, N, H] -> [B, S, N@ulysses, H]: 1 all-to-all for q, k and v
    q_BSNH, k_BSKH, v_BSKH = seq_to_heads(q_BSNH, k_BSKH, v_BSKH, mesh=mesh, table=table, seq_len=shape[1])
    o_BSNH = attention(q_BSNH, k_BSKH, v_BSKH, table=table, mesh=mesh, cu_seqlens=cu_seqlens)
    # [B, S, N@ulysses, H] -> [B, S@ulysses, N, H]: 1 all-to-all
    o_BSNH = heads_to_seq(o_BSNH, num_heads=cfg.num_heads, mesh=mesh, table=table, seq_len=shape[1])
    y_BSD = F.linear(o_BSNH.flatten(-2), w.wo)
    spec = linear_out(linear_out(table.attn_x, table.use["wq"]), table.use["wo"])
    y_BSD = redistribute(y_BSD, spec, table.residual, mesh, shape=shape)  # attn_x -> residual
    return y_BSD if w.bo is None else y_BSD + w.bo


def mlp_part(
    x_BSD: Tensor, w: Block, *, cfg: LlamaConfig, table: Table, mesh: Mesh, shape: tuple[int, int, int]
) -> Tensor:
    """x at table.residual -> the MLP's contribution to it, same placement."""
    x_BSD = rms_norm(x_BSD, w.norm_mlp, eps=cfg.rms_eps)
    x_BSD = redistribute(x_BSD, table.residual, table.mlp_x, mesh, shape=shape)  # residual -> mlp_x
    h_BSF = F.silu(F.linear(x_BSD, w.w_gate, w.b_gate)) * F.linear(x_BSD, w.w_up, w.b_up)
    y_BSD = F.linear(h_BSF, w.w_down)
    spec = linear_out(linear_out(table.mlp_x, table.use["w_gate"]), table.use["w_down"])
    y_BSD = redistribute(y_BSD, spec, table.residual, mesh, shape=shape)  # mlp_x -> residual
    return y_BSD if w.b_down is None else y_BSD + w.b_down


def block(
    x_BSD: Tensor,
    layer: Block,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor | None,
    *,
    cfg: LlamaConfig,
    table: Table,
    mesh: Mesh,
    shape: tuple[int, int, int],
) -> Tensor:
    """One decoder layer on x at table.residual; `layer` at rest, `shape` the global [B, S, D]."""
    w = in_use(layer, cfg, table, mesh)
    x_BSD = x_BSD + attention_part(
        x_BSD, w, cos, sin, cu_seqlens, cfg=cfg, table=table, mesh=mesh, shape=shape
    )
    return x_BSD + mlp_part(x_BSD, w, cfg=cfg, table=table, mesh=mesh, shape=shape)


def _embedding_in_use(params: Params, cfg: LlamaConfig, table: Table, mesh: Mesh) -> Tensor:
    return use_leaf(params.embed, "embed", abstract(cfg).embed, table, mesh)


def _hidden(
    params: Params, embed_VD: Tensor, shard: Shard, cfg: LlamaConfig, *, table: Table, mesh: Mesh, remat: str
) -> Tensor:
    """As `hidden`, with the embedding in use already."""
    check_layout(cfg, mesh=mesh, table=table, seq_len=shard.seq_len)
    batch = shard.orig[0]
    shape = (batch, shard.seq_len, cfg.hidden_size)
    by_token = P(*table.tokens.dims, None)
    positions = redistribute(
        shard.positions, table.tokens, P(*table.attn_x.dims[:2]), mesh, shape=shape[:2]
    )  # no collective where attention's input is placed as the tokens are
    cos, sin = rope_cos_sin(positions, cfg, embed_VD.dtype)
    x_BSD = F.embedding(shard.tokens, embed_VD)
    x_BSD = redistribute(x_BSD, by_token, table.residual, mesh, shape=shape)
    step = partial(block, cfg=cfg, table=table, mesh=mesh, shape=shape)
    x_BSD = scan(step, x_BSD, params.layers, cos, sin, shard.cu_seqlens, remat=remat)
    norm_D = use_leaf(params.norm, "norm", abstract(cfg).norm, table, mesh)
    x_BSD = rms_norm(x_BSD, norm_D, eps=cfg.rms_eps)
    return redistribute(x_BSD, table.residual, by_token, mesh, shape=shape)


def hidden(
    params: Params, shard: Shard, cfg: LlamaConfig, *, table: Table, mesh: Mesh, remat: str = "none"
) -> Tensor:
    """Final hidden states, normalised.

    params: this rank's shards at rest; shard: from `shard_batch`. Result: [B, S, D] placed as table.tokens.
    Communicates, per layer: 2 all-to-alls each way over the axis that attention trades for heads, and one
    all-gather (reduce-scatter backward) per weight that is sharded at rest. ValueError from `check_layout`.
    """
    embed_VD = _embedding_in_use(params, cfg, table, mesh)
    return _hidden(params, embed_VD, shard, cfg, table=table, mesh=mesh, remat=remat)


def _hidden_and_head(
    params: Params, shard: Shard, cfg: LlamaConfig, *, table: Table, mesh: Mesh, remat: str
) -> tuple[Tensor, Tensor]:
    embed_VD = _embedding_in_use(params, cfg, table, mesh)  # moved once, also when it is the head too
    x_BSD = _hidden(params, embed_VD, shard, cfg, table=table, mesh=mesh, remat=remat)
    if params.lm_head is None:
        return x_BSD, embed_VD
    return x_BSD, use_leaf(params.lm_head, "lm_head", abstract(cfg).lm_head, table, mesh)


def logits(
    params: Params, shard: Shard, cfg: LlamaConfig, *, table: Table, mesh: Mesh, remat: str = "none"
) -> Tensor:
    """[B, S, V] placed as table.tokens: whole logits of this rank's tokens. For short inputs."""
    x_BSD, head_VD = _hidden_and_head(params, shard, cfg, table=table, mesh=mesh, remat=remat)
    return F.linear(x_BSD, head_VD)


def loss(
    params: Params, shard: Shard, cfg: LlamaConfig, *, table: Table, mesh: Mesh, remat: str = "none"
) -> Tensor:
    """This rank's part of the loss: the SUM over all ranks is the mean over the valid labels of the batch.

    Scalar, float32 (float64 for float64 parameters). A rank without a valid label adds exactly zero and stays
    connected. Communicates as `hidden` does, and nothing for the loss itself.
    """
    x_BSD, head_VD = _hidden_and_head(params, shard, cfg, table=table, mesh=mesh, remat=remat)
    total = linear_cross_entropy(x_BSD, head_VD, shard.labels)
    return total / (shard.num_valid.clamp(min=1) * _num_replicas(table, mesh)).to(total.dtype)


def _num_replicas(table: Table, mesh: Mesh) -> int:
    """How many ranks hold the same tokens, and so compute the same losses."""
    return prod(size for axis, size in axis_sizes(mesh).items() if axis not in table.tokens.axes)
