"""What a plan of memory is made of: moments of a step, room for parameters, what is kept for the backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from usp.models.params import Block, Leaf, abstract
from usp.models.plan.local import Local
from usp.models.plan.memory_layer import MLP_LEAVES, LayerBytes
from usp.models.plan.routes import Room, room
from usp.models.plan.segments import Segment


class Phase(NamedTuple):
    """One moment: what lives, largest parts by name."""

    name: str
    parts: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())

    @property
    def at_rest(self) -> int:
        """Parameters, and moments where they are on the device."""
        return self.parts["parameters"] + self.parts.get("moments", 0)


class Memory(NamedTuple):
    """`phases` of one step on the device; `host`: page-locked bytes that offload needs there."""

    phases: tuple[Phase, ...]
    host: int

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.nbytes)


class Rooms(NamedTuple):
    layer: Room
    mlp: Room
    embed: Room
    head: Room  # with the final norm; of the norm alone where the embedding is the head
    all: int  # parameters at rest


def rooms_of(where: Local) -> Rooms:
    tree, num_layers = abstract(where.cfg), where.cfg.num_layers
    leaves: dict[str, Leaf | None] = dict(zip(Block._fields, tree.layers[0], strict=True))
    layer, embed = room(leaves, where), room({"embed": tree.embed}, where)
    head = room({"norm": tree.norm, "lm_head": tree.lm_head}, where)
    mlp = room({name: leaves[name] for name in MLP_LEAVES}, where)
    return Rooms(layer, mlp, embed, head, layer.rest * num_layers + embed.rest + head.rest)


class Kept(NamedTuple):
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
