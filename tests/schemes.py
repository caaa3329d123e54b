"""Every scheme the tests run: the presets, that of the examples, and three that only the tests know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from usp.mesh import TABLES, P, Table
from usp.tools.examples.tp_sp import TP_SP

_CUT_OUT = ("wq", "wk", "wv", "w_gate", "w_up")
_CUT_IN = ("wo", "w_down")
_CUT_BIAS = ("bq", "bk", "bv", "b_gate", "b_up")
_CUT: Mapping[str, P] = {
    **dict.fromkeys(_CUT_OUT, P("ulysses", None)),
    **dict.fromkeys(_CUT_IN, P(None, "ulysses")),
    **dict.fromkeys(_CUT_BIAS, P("ulysses")),
}
_BY_RING = P("dp", "ring", None)

# Attention and MLP gather the sequence and keep their weights cut over the same ranks, by heads and by
# features, so that what they add to the residual is a partial sum.
MINE: Table = replace(
    TABLES["ulysses"],
    name="mine",
    attn_x=_BY_RING,
    mlp_x=_BY_RING,
    use={**TABLES["ulysses"].use, **_CUT},
)
# The same, with a ring around it.
RING_TP: Table = replace(
    TABLES["odysseus"], name="ring_tp", mlp_x=_BY_RING, use={**TABLES["odysseus"].use, **_CUT}
)
# As usp with the two axes in each other's place: heads over `ring`, a ring over `ulysses`.
_SEQUENCE = ("ulysses", "ring")
SWAPPED: Table = replace(
    TABLES["usp"],
    name="swapped",
    tokens=P("dp", _SEQUENCE),
    residual=P("dp", _SEQUENCE, None),
    attn_x=P("dp", _SEQUENCE, None),
    q=P("dp", "ulysses", "ring", None),
    kv=P("dp", "ulysses", "ring", None),
    mlp_x=P("dp", _SEQUENCE, None),
)
SCHEMES: Mapping[str, Table] = {**TABLES, **{t.name: t for t in (MINE, TP_SP, RING_TP, SWAPPED)}}
