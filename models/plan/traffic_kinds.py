"""`Traffic`: one kind of collective, how often, and what one rank sends with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from usp.mesh.spec import Axes

SHIFT = "shift"
"""To the next rank of a ring and from the one before: an all-to-all whose other pieces are empty."""


class Traffic(NamedTuple):
    """`calls` collectives of one kind over `axes`; `nbytes`: what one rank sends with all of them."""

    what: str
    kind: str
    axes: Axes
    calls: int
    nbytes: int


def totals(traffic: Iterable[Traffic]) -> dict[str, tuple[int, int]]:
    """Kind -> collectives and bytes; a shift counts as the all-to-all that it is."""
    found: dict[str, tuple[int, int]] = {}
    for t in traffic:
        kind = "all_to_all" if t.kind == SHIFT else t.kind
        count, nbytes = found.get(kind, (0, 0))
        found[kind] = (count + t.calls, nbytes + t.nbytes)
    return found
