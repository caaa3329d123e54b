"""How a group of leaves comes from rest to use, in numbers: what travels together, and the room it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from usp.mesh import P
from usp.mesh.packing import Slot, gathered_axes, make_slot
from usp.mesh.spec import Axes, local_range
from usp.models.own_heads import use_spec
from usp.models.params import Leaf, spec_of
from usp.models.plan.local import Local


class Other(NamedTuple):
    """A leaf that `redistribute` moves alone."""

    src: P
    dst: P
    shape: tuple[int, ...]


class Routes(NamedTuple):
    """`Bundle`'s leaves by the axes that they are gathered over, and those that move alone."""

    together: dict[Axes, list[Slot]]
    alone: list[Other]


class Room(NamedTuple):
    """Elements of one rank: at rest, in use, sent in a gather, received in it; `num_leaves` in all."""

    rest: int
    use: int
    sent: int
    received: int


def routes(leaves: Mapping[str, Leaf | None], where: Local) -> Routes:
    found = Routes({}, [])
    for i, (name, leaf) in enumerate(leaves.items()):
        if leaf is None:
            continue
        src, dst = _specs(name, leaf, where)
        try:
            cut = gathered_axes(src, dst, where.sizes)
        except LookupError:
            found.alone.append(Other(src, dst, leaf.shape))
            continue
        if cut is None:
            continue
        axes = tuple(a for a in where.sizes if a in cut[2])
        places = _places({a: where.sizes[a] for a in axes})
        slot = make_slot(i, src, cut[0], cut[1], leaf.shape, sizes=where.sizes, at=where.at, members=places)
        found.together.setdefault(axes, []).append(slot)
    return found


def room(leaves: Mapping[str, Leaf | None], where: Local) -> Room:
    rest = use = 0
    for name, leaf in leaves.items():
        if leaf is not None:
            src, dst = _specs(name, leaf, where)
            rest += _elements(src, leaf, where)
            use += _elements(dst, leaf, where)
    together = routes(leaves, where).together
    sent = {axes: sum(slot.padded for slot in slots) for axes, slots in together.items()}
    received = sum(n * math.prod(where.sizes[a] for a in axes) for axes, n in sent.items())
    return Room(rest, use, sum(sent.values()), received)


def stages(axes: Axes, sizes: Mapping[str, int]) -> list[Axes]:
    """One group for all axes of the mesh, else one for each axis, outermost first."""
    everything = axes == tuple(a for a, size in sizes.items() if size > 1)
    return [axes] if everything else [(a,) for a in axes]


def _specs(name: str, leaf: Leaf, where: Local) -> tuple[P, P]:
    table = where.table
    return spec_of(table.rest, name, leaf, table=table.name), use_spec(where.cfg, table, where.sizes, name)


def _elements(spec: P, leaf: Leaf, where: Local) -> int:
    return math.prod(
        local_range(n, axes, where.sizes, where.at)[1] for n, axes in zip(leaf.shape, spec.dims, strict=True)
    )


def _places(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Coordinates of all members, in rank order."""
    found = []
    for index in range(math.prod(sizes.values())):
        at, rest = {}, index
        for axis in reversed(list(sizes)):
            rest, at[axis] = divmod(rest, sizes[axis])
        found.append(at)
    return found
