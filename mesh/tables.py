"""Parallel schemes as tables: logical tensor -> placement. A new scheme is a new table, not new code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from usp.mesh.spec import Axes, P

MATRICES = ("embed", "lm_head", "wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
VECTORS = (
    "norm", "norm_attn", "norm_mlp", "q_norm", "k_norm",
    "bq", "bk", "bv", "bo", "b_gate", "b_up", "b_down",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Table:
    """One scheme. Activations (B batch, S sequence, D model, N query and K kv heads, H head size):

    tokens [B, S]; residual [B, S, D]; attn_x [B, S, D] where q, k, v are projected; q [B, S, N, H] and
    kv [B, S, K, H] where attention runs; mlp_x [B, S, D] where the MLP runs.
    Weights by leaf name: `rest` between uses (sharded = ZeRO-3), `use` while a layer computes.

    An axis that still shards attention's sequence makes it a ring over that axis; one that shards its heads
    keeps those heads local. Heads are dealt evenly, kv heads follow the query heads that need them: kv is
    placed as q. Of axes larger than 1 one at most moves from the sequence to the heads, and one at most stays
    on the sequence; `usp.models.check_layout` says what else does not go together.
    """

    name: str
    tokens: P
    residual: P
    attn_x: P
    q: P
    kv: P
    mlp_x: P
    rest: Mapping[str, P]
    use: Mapping[str, P]


def differences(a: Table, b: Table) -> str:
    """The rows in which two schemes differ, side by side."""
    lines = [("", a.name, b.name)]
    for column in ("tokens", "residual", "attn_x", "q", "kv", "mlp_x"):
        lines.append((column, str(getattr(a, column)), str(getattr(b, column))))
    for kind in ("rest", "use"):
        for leaf in sorted(getattr(a, kind).keys() | getattr(b, kind).keys()):
            mine, other = (str(getattr(t, kind).get(leaf)) for t in (a, b))
            lines.append((f"{kind}[{leaf}]", mine, other))
    lines = lines[:1] + [line for line in lines[1:] if line[1] != line[2]]
    widths = [max(len(line[i]) for line in lines) for i in range(2)]
    return "\n".join(f"{row:<{widths[0]}}  {x:<{widths[1]}}  {y}".rstrip() for row, x, y in lines)


def weights(matrix: P, vector: P, **leaves: P) -> Mapping[str, P]:
    """Placements of all weight leaves: `matrix` for 2-D, `vector` for 1-D, and exceptions by name."""
    both = dict.fromkeys(MATRICES, matrix) | dict.fromkeys(VECTORS, vector)
    return MappingProxyType(both | leaves)


def by_head(axes: Axes | str) -> dict[str, P]:
    """Attention's weights cut by head: wq, wk, wv and their biases on the way out, wo on the way in."""
    out, bias = dict.fromkeys(("wq", "wk", "wv"), P(axes, None)), dict.fromkeys(("bq", "bk", "bv"), P(axes))
    return {**out, **bias, "wo": P(None, axes)}


EVERYWHERE = ("dp", "ring", "ulysses")
SEQUENCE = ("ring", "ulysses")
ZERO3 = weights(P(EVERYWHERE, None), P(EVERYWHERE))
WHOLE = weights(P(None, None), P(None))

# One device's work, repeated: nothing is cut but the rows of the batch.
_REPLICATED = Table(
    name="replicated",
    tokens=P("dp", None),
    residual=P("dp", None, None),
    attn_x=P("dp", None, None),
    q=P("dp", None, None, None),
    kv=P("dp", None, None, None),
    mlp_x=P("dp", None, None),
    rest=WHOLE,
    use=WHOLE,
)

# The sequence is cut; attention trades that cut for one over heads (arXiv 2309.14509).
_ULYSSES = Table(
    name="ulysses",
    tokens=P("dp", "ulysses"),
    residual=P("dp", "ulysses", None),
    attn_x=P("dp", "ulysses", None),
    q=P("dp", None, "ulysses", None),
    kv=P("dp", None, "ulysses", None),
    mlp_x=P("dp", "ulysses", None),
    rest=ZERO3,
    use=WHOLE,
)

# The sequence stays cut in attention too: keys and values travel (arXiv 2310.01889).
_RING = Table(
    name="ring",
    tokens=P("dp", "ring"),
    residual=P("dp", "ring", None),
    attn_x=P("dp", "ring", None),
    q=P("dp", "ring", None, None),
    kv=P("dp", "ring", None, None),
    mlp_x=P("dp", "ring", None),
    rest=ZERO3,
    use=WHOLE,
)

# Both: heads over the inner axis, a ring over the outer (arXiv 2405.07719).
_USP = Table(
    name="usp",
    tokens=P("dp", SEQUENCE),
    residual=P("dp", SEQUENCE, None),
    attn_x=P("dp", SEQUENCE, None),
    q=P("dp", "ring", "ulysses", None),
    kv=P("dp", "ring", "ulysses", None),
    mlp_x=P("dp", SEQUENCE, None),
    rest=ZERO3,
    use=WHOLE,
)

# As usp, but attention's weights stay cut by head and its input is gathered instead
# (github.com/feifeibear/Odysseus-Transformer).
_ODYSSEUS = replace(
    _USP,
    name="odysseus",
    attn_x=P("dp", "ring", None),
    rest=MappingProxyType({**ZERO3, **by_head(("ulysses", "dp", "ring"))}),
    use=MappingProxyType({**WHOLE, **by_head("ulysses")}),
)

TABLES: Mapping[str, Table] = MappingProxyType(
    {t.name: t for t in (_ULYSSES, _RING, _USP, _ODYSSEUS, _REPLICATED)}
)
