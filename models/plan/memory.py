"""Memory of one rank in a training step, counted from the code: what lives when. No tensors, no processes.

A step passes through a few moments that can be its peak: the loss, a layer's gradient, the embedding's, the
update. Each is a list of what lives then, in bytes; the allocator's own loss is not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import signature
from math import prod
from typing import NamedTuple, Unpack

import torch

from usp.loss import MAX_TILE_ELEMENTS, linear_cross_entropy
from usp.mesh import Table, local_shape
from usp.models.config import LlamaConfig
from usp.models.options import Options
from usp.models.params import Block, Leaf, abstract, named_leaves, param_specs
from usp.models.plan.local import Local, local
from usp.models.plan.memory_layer import MLP_LEAVES, LayerBytes
from usp.models.plan.routes import Room, room
from usp.models.plan.segments import Segment, segments

LOSS_TILE: int = signature(linear_cross_entropy).parameters["tile"].default  # tokens


class Phase(NamedTuple):
    """One moment: what lives, largest parts by name."""

    name: str
    parts: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())


class Memory(NamedTuple):
    """`phases` of one step on the device; `host`: page-locked bytes that offload needs there."""

    phases: tuple[Phase, ...]
    host: int

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.nbytes)


class _Rooms(NamedTuple):
    layer: Room
    mlp: Room
    embed: Room
    head: Room  # with the final norm; of the norm alone where the embedding is the head
    all: int  # parameters at rest


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
    live, "device" or "host" (`adamw_init` with an arena).
    """
    where = local(cfg, table, sizes, batch=batch, seq_len=seq_len, at=at)
    dtype = options.get("dtype") or rest
    layer = LayerBytes(
        where=where,
        dtype=dtype,
        compiled=options.get("compile", False),
        mlp_tile=options.get("mlp_tile"),
        head_chunks=options.get("head_chunks", 1),
    )
    rooms = _rooms(where)
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
    kept = _Kept(
        layer,
        segments(options.get("remat", "none"), cfg.num_layers),
        options.get("group", 1),
        options.get("offload", "none") == "host",
        rooms.layer.use * layer.item,
    )
    phases = [
        *_loss(base, layer, kept, rooms, tokens),
        *(_layer(base, layer, kept, rooms, rest, i) for i in kept.heaviest()),
        _embedding(base, layer, rooms, rest, tied=cfg.tie_embeddings),
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


def _rooms(where: Local) -> _Rooms:
    tree, num_layers = abstract(where.cfg), where.cfg.num_layers
    leaves: dict[str, Leaf | None] = dict(zip(Block._fields, tree.layers[0], strict=True))
    layer, embed = room(leaves, where), room({"embed": tree.embed}, where)
    head = room({"norm": tree.norm, "lm_head": tree.lm_head}, where)
    mlp = room({name: leaves[name] for name in MLP_LEAVES}, where)
    return _Rooms(layer, mlp, embed, head, layer.rest * num_layers + embed.rest + head.rest)


class _Kept(NamedTuple):
    """What the forward leaves for the backward, by the options of the scan."""

    layer: LayerBytes
    parts: tuple[Segment, ...]
    group: int
    offloaded: bool
    weights: int
    """Bytes of one layer's weights in use."""

    def results(self, part: Segment) -> int:
        return self.layer.results if part.remat == "attention" else 0

    def of(self, part: Segment) -> int:
        """On the device when the forward is done."""
        num = part.stop - part.start
        if part.remat == "none":
            return num * (self.layer.saved + self.weights)
        if self.offloaded:
            return self.layer.x + self.results(part)  # the last layer's
        return -(-num // self.group) * self.layer.x + num * self.results(part)

    def whole(self) -> int:
        return sum(self.of(part) for part in self.parts)

    def beside(self, i: int) -> int:
        """While layer i's gradient is made: of what is kept, and found again, for it and those before it."""
        before = sum(self.of(part) for part in self.parts if part.stop <= i)
        part = self.part(i)
        num = i - part.start
        if part.remat == "none":  # each layer's is let go when it is used
            return before + self.layer.x + (num + 1) * self.weights + num * self.layer.saved
        found = (min(self.group, part.stop - part.start) - 1) * self.layer.x  # a group's inputs
        if self.offloaded:
            return before + found + self.layer.x + self.results(part)
        return before + found + self.of(part)

    def coming(self, i: int) -> int:
        """Fetched for the layer before i when attention's gradient of i is through: its input, and what it
        kept, in the place of what i kept."""
        part = self.part(i)
        if not self.offloaded or part.remat == "none" or i == part.start:
            return 0
        return self.layer.x

    def part(self, i: int) -> Segment:
        return next(part for part in self.parts if i < part.stop)

    def host(self) -> int:
        total = 0
        for part in self.parts if self.offloaded else ():
            others = part.stop - part.start - 1
            if part.remat != "none":
                total += -(-others // self.group) * self.layer.x + others * self.results(part)
        return total

    def heaviest(self) -> list[int]:
        """Layers whose gradient may be the peak: the first two and the last of every segment."""
        ends = [(part.start, min(part.start + 1, part.stop - 1), part.stop - 1) for part in self.parts]
        return sorted({i for three in ends for i in three})


def _loss(
    base: Mapping[str, int], layer: LayerBytes, kept: _Kept, rooms: _Rooms, tokens: int
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
    # a tile's logits and their gradient; eager, also in float32 with what the log-sum-exp makes of it
    logits = tile * (2 if layer.compiled else 2 + 2 * wide)
    yield Phase("loss", {**held, "loss": logits + wide * head * item})
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


def _layer(
    base: Mapping[str, int], layer: LayerBytes, kept: _Kept, rooms: _Rooms, rest: torch.dtype, i: int
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


def _embedding(
    base: Mapping[str, int], layer: LayerBytes, rooms: _Rooms, rest: torch.dtype, *, tied: bool
) -> Phase:
    whole, sums = rooms.embed.use * layer.item, max(layer.item, 4)
    moved = (rooms.embed.received + rooms.embed.sent) * sums or rooms.embed.use * rest.itemsize
    parts = {
        "gradients": (rooms.all - rooms.embed.rest) * rest.itemsize,
        "embedding": (3 if tied else 1) * whole + moved,
        "x and its gradients": layer.x,
    }
    return Phase("embedding", {**base, **parts})
