"""Layers that are treated alike, in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """Neighbouring layers that are treated alike."""

    remat: str
    start: int
    stop: int


def segments(remat: str | Sequence[str], num_layers: int) -> tuple[Segment, ...]:
    """`remat` as `usp.scan` takes it: one name, or one per layer."""
    found: list[Segment] = []
    for i, one in enumerate([remat] * num_layers if isinstance(remat, str) else remat):
        if found and found[-1].remat == one:
            found[-1] = found[-1]._replace(stop=i + 1)
        else:
            found.append(Segment(one, i, i + 1))
    return tuple(found)
