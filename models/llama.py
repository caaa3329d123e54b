"""The Llama family as pure functions of a parameter tree and one rank's shard of a batch.

Dimension letters: B batch, S sequence, D model, N query heads, K kv heads, H head size, F feed-forward,
V vocabulary. Where things live is read from the table alone; with a mesh of ones nothing communicates.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Unpack

import torch.nn.functional as F
from torch import Tensor

from usp import Shard, linear_cross_entropy, scan
from usp.levels import one_gradient
from usp.mesh import P, Table, axis_sizes, redistribute
from usp.models.block import block
from usp.models.config import LlamaConfig
from usp.models.embedding import embed
from usp.models.gather import Coming, layer_bundle
from usp.models.options import Options, check_options
from usp.models.params import Mesh, Params
from usp.models.parts import local_parts
from usp.models.rope import rope_cos_sin


def _hidden(
    params: Params,
    x_BSD: Tensor,
    shard: Shard,
    cfg: LlamaConfig,
    table: Table,
    mesh: Mesh,
    options: Options,
    coming: Coming,
) -> Tensor:
    """What the layers make of x, both placed as table.residual; `coming` is on its way by then."""
    shape = (shard.orig[0], shard.seq_len, cfg.hidden_size)
    positions = redistribute(
        shard.positions, table.tokens, P(*table.attn_x.dims[:2]), mesh, shape=shape[:2]
    )  # no collective where attention's input is placed as the tokens are
    cos, sin = rope_cos_sin(positions, cfg, x_BSD.dtype, seq_len=shard.orig[1])
    step = partial(
        block, cfg=cfg, table=table, mesh=mesh, shape=shape,
        mlp_tile=options.get("mlp_tile"),
        kernel=options.get("kernel", "auto"),
        head_chunks=options.get("head_chunks", 1),
        compiled=options.get("compile", False),
    )  # fmt: skip
    windows = [{"window": cfg.window_of(i)} for i in range(cfg.num_layers)] if cfg.windows else ()
    return scan(
        step, x_BSD, params.layers, cos, sin, shard.cu_seqlens,
        each=windows,
        remat=options.get("remat", "none"),
        group=options.get("group", 1),
        offload=options.get("offload", "none"),
        arena=options.get("arena"),
        gather=coming.behind(layer_bundle(cfg, table, mesh, options.get("dtype"))),
    )  # fmt: skip


def _stored(options: Options) -> bool:
    """Whether the scan runs no layer again and sends gradients behind (`usp.scan`): then no gather of the
    backward stands behind the head's gradient, and the peak of memory is the loss, not a layer."""
    remat = options.get("remat", "none")
    return one_gradient() and (remat == "none" or set(remat) == {"none"})


def _normed(
    x_BSD: Tensor, norm_D: Tensor, shard: Shard, cfg: LlamaConfig, table: Table, mesh: Mesh, compiled: bool
) -> Tensor:
    """The final norm: table.residual -> table.tokens. A scan of one layer, which runs where it compiles."""
    x_BSD = scan(local_parts(cfg, compiled).norm, x_BSD, (norm_D,))
    shape = (shard.orig[0], shard.seq_len, cfg.hidden_size)
    return redistribute(x_BSD, table.residual, P(*table.tokens.dims, None), mesh, shape=shape)


def hidden(
    params: Params, shard: Shard, cfg: LlamaConfig, *, table: Table, mesh: Mesh, **options: Unpack[Options]
) -> Tensor:
    """Final hidden states, normalised.

    params: this rank's shards at rest; shard: from `shard_batch`. Result: [B, S, D] placed as table.tokens.
    `options`: remat="none", group=1, offload="none" and arena=None as in `usp.scan`; compile=False,
    whether norms, projections and activations are compiled (once for all layers, see `usp.models.parts`);
    dtype=None, the type that parameters are cast to before they travel and that the model computes in;
    mlp_tile=None, the tokens that the MLP sees at a time; kernel="auto", see `usp.attention`; head_chunks=1,
    in how many parts a rank's heads are taken through attention (`usp.head_chunks`).

    Communicates, per layer: 2 all-to-alls each way over the axis that attention trades for heads (more with
    `head_chunks`, see there), what a ring sends and the table's moves of x, 1 gather for all parameters that
    are cut alike at rest (with remat one more in the backward) and 1 reduce-scatter of their gradients;
    `model_traffic` counts it. Around the layers the same for the norm and the
    head, and what `usp.models.embedding` does. ValueError from `check_layout` and `scan`.
    """
    check_options(params, shard, cfg, table=table, mesh=mesh, options=options)
    dtype = options.get("dtype")
    coming = Coming(params, ("norm",), cfg, table, mesh, dtype, late=_stored(options))
    x_BSD, _ = embed(params, shard, cfg, table, mesh, dtype)
    x_BSD = _hidden(params, x_BSD, shard, cfg, table, mesh, options, coming)
    (norm_D,) = coming.arrive()
    return _normed(x_BSD, norm_D, shard, cfg, table, mesh, options.get("compile", False))


def hidden_and_head(
    params: Params, shard: Shard, cfg: LlamaConfig, table: Table, mesh: Mesh, options: Options
) -> tuple[Tensor, Tensor]:
    """[B, S, D] placed as table.tokens after the final norm, and the head [V, D] in use: for other losses.

    Communicates as `loss`. Raises ValueError for options that do not fit.
    """
    check_options(params, shard, cfg, table=table, mesh=mesh, options=options)
    dtype = options.get("dtype")
    names = ("norm",) if params.lm_head is None else ("norm", "lm_head")
    coming = Coming(params, names, cfg, table, mesh, dtype, late=_stored(options))
    x_BSD, embed_VD = embed(params, shard, cfg, table, mesh, dtype)
    x_BSD = _hidden(params, x_BSD, shard, cfg, table, mesh, options, coming)
    norm_D, *head = coming.arrive()
    x_BSD = _normed(x_BSD, norm_D, shard, cfg, table, mesh, options.get("compile", False))
    head_VD = head[0] if head else embed_VD  # gathered once where it is both
    assert head_VD is not None
    return x_BSD, head_VD


def logits(
    params: Params, shard: Shard, cfg: LlamaConfig, *, table: Table, mesh: Mesh, **options: Unpack[Options]
) -> Tensor:
    """[B, S, V] placed as table.tokens: whole logits of this rank's tokens. For short inputs."""
    x_BSD, head_VD = hidden_and_head(params, shard, cfg, table, mesh, options)
    return F.linear(x_BSD, head_VD)


def loss(
    params: Params, shard: Shard, cfg: LlamaConfig, *, table: Table, mesh: Mesh, **options: Unpack[Options]
) -> Tensor:
    """This rank's part of the loss: the SUM over all ranks is the mean over the valid labels of the batch.

    Scalar, float32 (float64 for float64 parameters). A rank without a valid label adds exactly zero and stays
    connected. Options and communication as for `hidden`, and nothing for the loss itself.
    """
    x_BSD, head_VD = hidden_and_head(params, shard, cfg, table, mesh, options)
    compiled = options.get("compile", False)
    total = linear_cross_entropy(x_BSD, head_VD, shard.labels, compiled=compiled)
    return mean_of(total, shard.num_valid, table, mesh)


def mean_of(total: Tensor, count: Tensor, table: Table, mesh: Mesh) -> Tensor:
    """This rank's part of the mean: the sum of its losses over all ranks' targets, or over all their weights.

    A count of 0 leaves the sum, which is then exactly zero. Ranks that hold the same tokens share theirs.
    """
    replicas = prod(size for axis, size in axis_sizes(mesh).items() if axis not in table.tokens.axes)
    return total / (count.where(count > 0, 1.0) * replicas).to(total.dtype)
