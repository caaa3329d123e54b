"""Memory of one rank around the layers: the loss with the head and the final norm, and the embedding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import signature

import torch

from usp.loss import MAX_TILE_ELEMENTS, linear_cross_entropy
from usp.models.embedding import rows_stay
from usp.models.params import abstract
from usp.models.plan.memory_layer import LayerBytes
from usp.models.plan.memory_parts import Kept, Phase, Rooms

LOSS_TILE: int = signature(linear_cross_entropy).parameters["tile"].default  # tokens


def loss_phases(
    base: Mapping[str, int], layer: LayerBytes, kept: Kept, rooms: Rooms, tokens: int
) -> Iterable[Phase]:
    """The loss with its gradients, and these on their way back."""
    cfg, item, wide = layer.where.cfg, layer.item, layer.wide
    tree = abstract(cfg)
    head = rooms.embed.use if tree.lm_head is None else rooms.head.use
    tile = min(LOSS_TILE, tokens, MAX_TILE_ELEMENTS // cfg.vocab_size) * cfg.vocab_size * item
    x = tokens * cfg.hidden_size * item
    held = {
        **base,
        "kept for the backward": kept.whole(),
        "weights in use": head * item,
        "x and its gradients": x + (1 if layer.compiled or wide == 1 else wide + 1) * x + 2 * x,
    }
    # compiled means a GPU: a tile's logits, over which the kernel writes their gradient; else that too, and
    # both in float32 with what the log-sum-exp makes of them. The head's gradient is rounded at the end
    logits = tile * (1 if layer.compiled else 2 + 2 * wide)
    rounded = 0 if wide == 1 else head * item
    yield Phase("loss", {**held, "loss": max(logits, rounded) + wide * head * item})
    yield Phase("loss, gradients scaled", {**held, "loss": 2 * head * item + x})
    if rooms.head.received and tree.lm_head is not None:
        moved = (rooms.head.received + rooms.head.sent) * max(item, 4)
        yield Phase("head, gradients summed", {**held, "loss": 2 * head * item + moved})
    passes = (3 + (2 if layer.compiled else 6 * wide)) * x  # of the norm's gradient, in float32 unless fused
    sums = rooms.head.rest * max(item, 4)
    yield Phase(
        "final norm",
        {**base, "kept for the backward": kept.whole(), "gradients": sums, "x and its gradients": passes},
    )


def embedding_phase(
    base: Mapping[str, int], layer: LayerBytes, rooms: Rooms, rest: torch.dtype, *, tied: bool
) -> Phase:
    whole, sums = rooms.embed.use * layer.item, max(layer.item, 4)
    where, dtype = layer.where, layer.dtype
    num_tokens = where.batch * where.seq_len
    if rows_stay(where.cfg, where.table, where.sizes, num_tokens, dtype):
        gathered = num_tokens * where.cfg.hidden_size * layer.item
        # the gradient of x whole, in its own type and in that of the rows
        held = gathered + gathered // layer.item * rest.itemsize + rooms.embed.rest * rest.itemsize
    else:
        moved = (rooms.embed.received + rooms.embed.sent) * sums or rooms.embed.use * rest.itemsize
        held = (3 if tied else 1) * whole + moved
    parts = {
        "gradients": (rooms.all - rooms.embed.rest) * rest.itemsize,
        "embedding": held,
        "x and its gradients": layer.x,
    }
    return Phase("embedding", {**base, **parts})
