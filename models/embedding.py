"""The embedding: its rows come to the tokens, or the tokens go to where the rows are at rest."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from usp import Shard
from usp.levels import levels
from usp.mesh import P, Table, axis_sizes, coordinates, redistribute
from usp.mesh.collectives import sum_dtype
from usp.mesh.spec import local_range
from usp.models.config import LlamaConfig
from usp.models.gather import in_use
from usp.models.params import Mesh, Params

WHOLE = P(None, None)


def embed(
    params: Params, shard: Shard, cfg: LlamaConfig, table: Table, mesh: Mesh, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """x [B, S, D] at table.residual, and the embedding in use [V, D] where it was gathered.

    Gathered, see `rows_stay`: 1 all-gather and, of the gradient, 1 reduce-scatter. Otherwise, over each axis,
    1 all-gather of the tokens and 1 reduce-scatter of x, of which every row is zero on all ranks but one, and
    1 all-gather of its gradient.
    """
    shape = (shard.orig[0], shard.seq_len, cfg.hidden_size)
    compute: torch.dtype = dtype or params.embed.dtype
    back = bool(levels()) or (torch.is_grad_enabled() and params.embed.requires_grad)
    if rows_stay(cfg, table, axis_sizes(mesh), shape[0] * shape[1], compute, back=back):
        return _of_own_rows(params.embed, shard.tokens, shape, cfg, table, mesh, compute), None
    (embed_VD,) = in_use(params, ("embed",), cfg, table, mesh, compute)
    x_BSD = F.embedding(shard.tokens, embed_VD)
    return redistribute(x_BSD, P(*table.tokens.dims, None), table.residual, mesh, shape=shape), embed_VD


def rows_stay(
    cfg: LlamaConfig,
    table: Table,
    sizes: Mapping[str, int],
    num_tokens: int,
    dtype: torch.dtype,
    *,
    back: bool = True,
) -> bool:
    """Whether the embedding stays at rest: where that sends less, for `num_tokens` over all ranks, and with a
    gradient or not (`back`); where all axes cut it, the tokens and x; and where it is not the head too."""
    axes = table.rest["embed"][0]
    real = {axis for axis, size in sizes.items() if size > 1}
    cut = {axis for axis in axes if sizes[axis] > 1}
    all_cut = real and cut == real and real <= table.tokens.axes and real <= table.residual.axes
    if cfg.tie_embeddings or not all_cut or table.rest["embed"][1] or table.use["embed"] != WHOLE:
        return False
    last = {axis: sizes[axis] - 1 for axis in axes}
    if not local_range(cfg.vocab_size, axes, sizes, last)[1]:
        return False  # a rank without rows
    of_x, of_rows = dtype.itemsize, dtype.itemsize
    if back:
        of_x, of_rows = of_x + dtype.itemsize, of_rows + sum_dtype(dtype).itemsize
    return num_tokens * of_x < cfg.vocab_size * of_rows


def pending_sum(table: Table) -> P:
    """x [B, S, D] before the sum of what each rank has rows for."""
    return P(None, None, None, partial=table.rest["embed"][0])


def _of_own_rows(
    rows_VD: Tensor,
    tokens_BS: Tensor,
    shape: tuple[int, int, int],
    cfg: LlamaConfig,
    table: Table,
    mesh: Mesh,
    dtype: torch.dtype,
) -> Tensor:
    """x at table.residual, each rank having looked up all tokens among its own rows."""
    tokens_BS = redistribute(tokens_BS, table.tokens, WHOLE, mesh, shape=shape[:2])
    start, own = local_range(
        cfg.vocab_size, table.rest["embed"][0], axis_sizes(mesh), coordinates(mesh)
    )  # [V@rest, D]
    known = (tokens_BS >= 0) & (tokens_BS < cfg.vocab_size)  # others are left for F.embedding to refuse
    others = known & ((tokens_BS < start) | (tokens_BS >= start + own))
    # cast behind the lookup: the gradient of a row, of all ranks' tokens, is summed in the type at rest
    x_BSD = F.embedding((tokens_BS - start).masked_fill(others, 0), rows_VD).to(dtype)
    x_BSD = x_BSD.masked_fill(others.unsqueeze(-1), 0)
    # exact in any type: one rank's row and zeros
    return redistribute(x_BSD, pending_sum(table), table.residual, mesh, shape=shape, reduce_dtype=dtype)
