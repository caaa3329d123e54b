"""Memory of one rank in a training step, counted from the code: what lives when. No tensors, no processes.

A step passes through a few moments that can be its peak: the loss, a layer's gradient, the embedding's, the
update. Each is a list of what lives then, in bytes; the allocator's own loss is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Unpack

import torch

from usp.data import check_tokens
from usp.mesh import Table, local_shape
from usp.models.config import LlamaConfig
from usp.models.options import Options
from usp.models.params import abstract, named_leaves, param_specs
from usp.models.plan.local import Local, local
from usp.models.plan.memory_around import embedding_phase, loss_phases
from usp.models.plan.memory_layer import LayerBytes
from usp.models.plan.memory_parts import Kept, Memory, Phase, Rooms, rooms_of
from usp.models.plan.segments import segments


def training_memory(
    cfg: LlamaConfig,
    table: Table,
    sizes: Mapping[str, int],
    *,
    batch: int,
    seq_len: int,
    at: Mapping[str, int] | None = None,
    rest: torch.dtype = torch.float32,
    accumulate: int = 1,
    clip_copies: bool = False,
    moments: str = "device",
    **options: Unpack[Options],
) -> Memory:
    """Bytes of the rank at coordinates `at` (else the first) in one step with AdamW and clipping.

    `batch` rows of `seq_len` tokens are worked on at once, `accumulate` times; parameters, gradients and
    moments are of type `rest`; `options` as for the model. `clip_copies`: whether clipping makes gradients
    anew (`clip_by_global_norm`), or AdamW scales them as it reads them (`clip_scale`). `moments`: where they
    live, "device" or "host" (`adamw_init` with an arena). Raises ValueError for more tokens than a batch can
    have.
    """
    where = local(cfg, table, sizes, batch=batch, seq_len=seq_len, at=at)
    check_tokens(batch, where.rows, where.seq_len)
    dtype = options.get("dtype") or rest
    layer = LayerBytes(
        where=where,
        dtype=dtype,
        compiled=options.get("compile", False),
        mlp_tile=options.get("mlp_tile"),
        head_chunks=options.get("head_chunks", 1),
    )
    rooms = rooms_of(where)
    base = {"parameters": rooms.all * rest.itemsize}
    of_moments, away, visiting = 2 * rooms.all * rest.itemsize, moments == "host", {}
    if away:
        visiting["moments visiting"] = _visiting(where) * rest.itemsize
    else:
        base["moments"] = of_moments
    if accumulate > 1:
        base["summed gradients"] = rooms.all * rest.itemsize
    tokens = where.tokens(table.tokens)
    base["tokens and positions"] = 24 * tokens + 2 * where.tokens(table.attn_x) * cfg.head_dim * layer.item
    kept = Kept(
        layer,
        segments(options.get("remat", "none"), cfg.num_layers),
        options.get("group", 1),
        options.get("offload", "none") == "host",
        rooms.layer.use * layer.item,
    )
    phases = [
        *loss_phases(base, layer, kept, rooms, tokens),
        *(_layer(base, layer, kept, rooms, rest, i) for i in kept.heaviest()),
        embedding_phase(base, layer, rooms, rest, tied=cfg.tie_embeddings),
        Phase("update", {**base, **visiting, "gradients": (1 + clip_copies) * rooms.all * rest.itemsize}),
    ]
    return Memory(tuple(phases), kept.host() + away * of_moments)


def _visiting(where: Local) -> int:
    """Elements of both moments of the two largest neighbours: one is used while the next comes."""
    specs = dict(named_leaves(param_specs(where.cfg, where.table)))
    leaves = [
        prod(local_shape(specs[name], leaf.shape, where.sizes, where.at))
        for name, leaf in named_leaves(abstract(where.cfg))
    ]
    return 2 * max(one + two for one, two in zip(leaves, [*leaves[1:], 0], strict=True))


def _layer(
    base: Mapping[str, int], layer: LayerBytes, kept: Kept, rooms: Rooms, rest: torch.dtype, i: int
) -> Phase:
    """Layer i's gradient: of its moments the largest. The last layers are past, their gradients at rest."""
    item, sums = layer.item, max(layer.item, 4)
    one, part = rooms.layer, kept.part(i)
    num_done = layer.where.cfg.num_layers - 1 - i
    travels = bool(one.received)
    again = part.remat != "none"
    weights = one.use * item if again else 0
    if i > part.start and again:  # the next one's under way
        weights += (one.sent + one.received if travels else one.use) * item
    done = {"gradients": (rooms.head.rest + num_done * one.rest) * rest.itemsize}
    if layer.where.cfg.tie_embeddings:
        done["gradient of the head"] = rooms.embed.use * item
    if num_done:  # the gradients of the layer before, as they travel
        done["weights' gradients under way"] = one.received * sums or one.use * item
    elif all(each.remat == "none" for each in kept.parts):
        done["head's gradient under way"] = rooms.head.received * sums
    last = i == part.stop - 1
    # what lives of the layer, what was fetched for the next, gradients of its weights
    moments = {
        "MLP": (layer.mlp_moment(again=again, last=last), 0, rooms.mlp.use // 3),
        "MLP's norm": (layer.norm_moment(again=again), 0, rooms.mlp.use),
        "attention": (layer.attention_moment(), 0, rooms.mlp.use),
        "attention's norm": (layer.input_moment(), kept.coming(i), one.use),
    }
    most = max(moments, key=lambda name: sum(moments[name][:2]) + moments[name][2] * item)
    of_layer, coming, own = moments[most]
    parts = {
        "kept for the backward": kept.beside(i) + coming,
        "weights in use": weights,
        "weights' gradients": own * item,
        **done,
        most: of_layer,
    }
    return Phase(f"layer {i}, {most}", {**base, **parts})
