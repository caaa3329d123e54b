"""One decoder layer: its local parts, and what moves between them. Placements come from the table alone.

Dimension letters: B batch, S sequence, D model, N query heads, K kv heads, H head size, F feed-forward.
"""

from __future__ import annotations

from functools import partial
from typing import TypedDict

import torch
from torch import Tensor

from usp import attention, heads_to_seq, seq_to_heads
from usp.attention import kept_result, knows_result
from usp.deal import Deal, with_equal_groups
from usp.heads import trading_axis, wired_to_heads
from usp.heads_back import begin_to_ranks, heads_to_ranks
from usp.kept import Kept
from usp.levels import levels, saving_hooks
from usp.mesh import Table, axis_sizes, redistribute
from usp.mesh.exchange import Begun, Unawaited
from usp.models.config import LlamaConfig
from usp.models.head_chunks import add_by_chunks
from usp.models.layout import linear_out
from usp.models.own_heads import own_heads
from usp.models.params import Block, Mesh
from usp.models.parts import Parts, add_linear, add_linear_of_parts, local_parts
from usp.tiles import tiled


class Where(TypedDict):
    cfg: LlamaConfig
    table: Table
    mesh: Mesh
    shape: tuple[int, int, int]


def block(
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
    mlp_tile: int | None = None,
    window: int | None = None,
    kernel: str = "auto",
    head_chunks: int = 1,
    compiled: bool = False,
    kept: Kept | None = None,
) -> Tensor:
    """One decoder layer on x at table.residual; `w` in use, `shape` the global [B, S, D].

    `kept`: attention's results, recorded or read, see `usp.scan`. `mlp_tile`: tokens of one tile of the MLP.
    `window`, `kernel`: as in `usp.attention`; `head_chunks`: how many parts attention's heads are taken in.
    `compiled`: whether the local parts are. A run forward sends 2 all-to-alls where attention trades sequence
    for heads (more with `head_chunks`), as does its backward, and what a ring sends (`usp.ring`).
    """
    where: Where = {"cfg": cfg, "table": table, "mesh": mesh, "shape": shape}
    parts = local_parts(cfg, compiled)
    w, deal = own_heads(w, cfg, table, mesh)
    rope = cos, sin
    early, late = (None, None) if head_chunks > 1 else _apart(x_BSD.shape[0], kept, kernel, where)
    if head_chunks > 1:
        x_BSD = add_by_chunks(
            x_BSD, w, rope, cu_seqlens, parts, window=window, kernel=kernel, head_chunks=head_chunks,
            compiled=compiled, kept=kept, **where,
        )  # fmt: skip
    else:
        if kept is not None and knows_result(kept, kernel) and not torch.is_grad_enabled():
            o_BSNH = kept_result(kept, again=False)  # nothing will read q, k, v
        else:
            q_BSNH, k_BSKH, v_BSKH = _qkv_at_heads(x_BSD, w, rope, deal, parts, where, late)
            o_BSNH = attention(
                q_BSNH, k_BSKH, v_BSKH, table=table, mesh=mesh, cu_seqlens=cu_seqlens, window=window,
                kernel=kernel, kept=kept,
            )  # fmt: skip
        x_BSD = _added(x_BSD, _back(o_BSNH, where, early), w.wo, w.bo, ("attn_x", "wq", "wo"), where)
    x_BSD = _mlp(x_BSD, w, parts, mlp_tile, kept, where)
    if late is not None:
        late.wait()
    return x_BSD


def _apart(rows: int, kept: Kept | None, kernel: str, where: Where) -> tuple[Begun | None, Unawaited | None]:
    """Where attention's result is known already, it sets out before the projections (of one row, which needs
    no copy for that, and unless it comes from the host), and q, k, v, which only the gradient reads, travel
    behind the MLP: (the result's exchange, that of q, k and v). Not where hooks, such as those that move what
    autograd saves to the host, would read these at once."""
    if kept is None or not knows_result(kept, kernel) or not torch.is_grad_enabled():
        return None, None
    if not _by_wire(where) or saving_hooks() or levels() or torch.compiler.is_compiling():
        return None, None
    if rows > 1 or not kept.at_hand:
        return None, Unawaited()
    cfg, table, mesh, seq_len = where["cfg"], where["table"], where["mesh"], where["shape"][1]
    o_BSNH = kept_result(kept, again=True)
    begun = begin_to_ranks(o_BSNH, num_heads=cfg.num_heads, mesh=mesh, table=table, seq_len=seq_len)
    return begun, Unawaited()


def _by_wire(where: Where) -> bool:
    """Whether every rank gets as many heads, written as they are sent by what projects them."""
    cfg, table, mesh = where["cfg"], where["table"], where["mesh"]
    axis = trading_axis(table, mesh)
    ranks = 1 if axis is None else axis_sizes(mesh)[axis]
    even = cfg.num_heads % ranks == 0 and cfg.num_kv_heads % ranks == 0
    return axis is not None and even and table.residual == table.attn_x


def _moved(x_BSD: Tensor, column: str, where: Where) -> Tensor:
    """table.residual -> another column of the table: nothing where both are placed alike."""
    table = where["table"]
    return redistribute(x_BSD, table.residual, getattr(table, column), where["mesh"], shape=where["shape"])


def _qkv_at_heads(
    x_BSD: Tensor,
    w: Block,
    rope: tuple[Tensor, Tensor],
    deal: Deal | None,
    parts: Parts,
    where: Where,
    late: Unawaited | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x at table.residual -> q, k, v where attention runs: [B, S, N@ulysses, H], 1 all-to-all at most.

    `late`: they are not there before it is waited for.
    """
    cfg, table, mesh, seq_len = where["cfg"], where["table"], where["mesh"], where["shape"][1]
    local, axis = table.residual == table.attn_x, trading_axis(table, mesh)
    if axis is not None and _by_wire(where):
        ranks = axis_sizes(mesh)[axis]
        wired = parts.norm_qkv_wire(x_BSD, w.norm_attn, w, *rope, ranks)
        own = [(n // ranks, cfg.head_dim) for n in (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads)]
        q, k, v = wired_to_heads(wired, own, mesh=mesh, table=table, seq_len=seq_len, apart=late)
        return q, k, v
    if local:
        q, k, v = parts.norm_qkv(x_BSD, w.norm_attn, w, *rope)
    else:
        q, k, v = parts.qkv(_moved(parts.norm(x_BSD, w.norm_attn), "attn_x", where), w, *rope)
    if deal is not None:
        k, v = with_equal_groups(k, v, deal, cfg.num_heads // cfg.num_kv_heads)
    return seq_to_heads(q, k, v, mesh=mesh, table=table, seq_len=seq_len)


def _back(o_BSNH: Tensor, where: Where, early: Begun | None) -> Tensor:
    """Attention's result where the next product is: 1 all-to-all. A rank's heads joined. `early`: begun."""
    cfg, table, mesh, seq_len = where["cfg"], where["table"], where["mesh"], where["shape"][1]
    axis = trading_axis(table, mesh)
    if axis is not None and cfg.num_heads % axis_sizes(mesh)[axis] == 0 and not levels():
        # [B, S, N@ulysses, H] -> [B, S@ulysses, ranks, N / ranks * H]
        return heads_to_ranks(
            o_BSNH, num_heads=cfg.num_heads, mesh=mesh, table=table, seq_len=seq_len, begun=early
        )
    # [B, S, N@ulysses, H] -> [B, S@ulysses, N * H]
    return heads_to_seq(o_BSNH, num_heads=cfg.num_heads, mesh=mesh, table=table, seq_len=seq_len).flatten(2)


def _added(
    x_BSD: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    names: tuple[str, str, str],
    where: Where,
    *,
    value: bool = True,
) -> Tensor:
    """x + y @ weight.T + bias, the product placed as its factors leave it and moved to table.residual.

    y [B, S, features], or [B, S, parts, features of each] of attention.
    """
    table = where["table"]
    column, first, second = names
    spec = linear_out(linear_out(getattr(table, column), table.use[first]), table.use[second])
    if spec == table.residual and y.dim() == 4:
        return add_linear_of_parts(x_BSD, y, weight, bias)
    y = y.flatten(2)
    if spec == table.residual:
        return add_linear(x_BSD, y, weight, bias, value=value)
    z_BSD = redistribute(y @ weight.T, spec, table.residual, where["mesh"], shape=where["shape"])
    return x_BSD + (z_BSD if bias is None else z_BSD + bias)


def _mlp(x_BSD: Tensor, w: Block, parts: Parts, tile: int | None, kept: Kept | None, where: Where) -> Tensor:
    """x plus the MLP's contribution, the block's result. `kept` says who reads it and its gradient."""
    value, own_grad = kept is None or not kept.value_unused, kept is not None and kept.own_grad
    table = where["table"]
    names = ("mlp_x", "w_gate", "w_down")
    local = table.residual == table.mlp_x
    if tile is None:
        if local:
            h_BSF = parts.norm_act(x_BSD, w.norm_mlp, w)
        else:
            h_BSF = parts.act(_moved(parts.norm(x_BSD, w.norm_mlp), "mlp_x", where), w)
        return _added(x_BSD, h_BSF, w.w_down, w.b_down, names, where, value=value)
    needed = {"w_gate", "b_gate", "w_up", "b_up", "w_down"} | ({"norm_mlp", "b_down"} if local else set())
    weights = w._replace(**dict.fromkeys(set(Block._fields) - needed))
    if local:  # norm and sum in the tile too: nothing but x and the result is ever whole

        def add(x_TD: Tensor, w: Block, value: bool = True) -> Tensor:
            return add_linear(x_TD, parts.norm_act(x_TD, w.norm_mlp, w), w.w_down, w.b_down, value=value)

        return tiled(
            add, x_BSD, weights, tile=tile, value=value, own_grad=own_grad, again=partial(add, value=False)
        )

    def again(h_TD: Tensor, w: Block) -> Tensor:
        nothing_TD = h_TD.new_zeros(()).expand(h_TD.shape)
        return add_linear(nothing_TD, parts.act(h_TD, w), w.w_down, None, value=False)

    h_BSD = _moved(parts.norm(x_BSD, w.norm_mlp), "mlp_x", where)
    y_BSD = tiled(parts.mlp, h_BSD, weights, tile=tile, value=value, again=again)
    spec = linear_out(linear_out(table.mlp_x, table.use["w_gate"]), table.use["w_down"])
    y_BSD = redistribute(y_BSD, spec, table.residual, where["mesh"], shape=where["shape"])
    return x_BSD + (y_BSD if w.b_down is None else y_BSD + w.b_down)
