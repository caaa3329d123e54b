"""Lengths as people write them: 131072, 128K or 2M tokens."""

from __future__ import annotations

import os
import re
from fractions import Fraction
from typing import Annotated

from tyro.constructors import PrimitiveConstructorSpec

TIMES = {"": 1, "k": 2**10, "m": 2**20}


def parse_tokens(text: str) -> int:
    """A number of tokens; K is 1024, M 1024 K, 1.5M 1536 K. Raises ValueError for anything else."""
    found = re.fullmatch(r"(-?\d+(?:\.\d+)?)([km]?)", text.strip().lower().replace("_", ""))
    if found is None or (tokens := Fraction(found[1]) * TIMES[found[2]]).denominator != 1:
        raise ValueError(f"{text!r} must be a number of tokens, such as 131072, 128K or 1.5M")
    return int(tokens)


def _given(words: list[str]) -> int:
    """As all other mistakes are told, not as the parser would."""
    try:
        return parse_tokens(words[0])
    except ValueError as e:
        first = os.environ.get("RANK", "0") == "0"
        raise SystemExit(f"error: {e}. Change that length." if first else 1) from None


Tokens = Annotated[
    int,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="TOKENS",
        instance_from_str=_given,
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
]
"""An option of this type takes 131072, 128K or 2M."""
