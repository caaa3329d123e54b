"""Parallel schemes as tables: logical tensor -> placement. A new scheme is a new table, not new code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from usp.mesh.spec import P

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
    keeps those heads local. Heads are dealt evenly, kv heads follow the query heads that need them.
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


def weights(matrix: P, vector: P, **leaves: P) -> Mapping[str, P]:
    """Placements of all weight leaves: `matrix` for 2-D, `vector` for 1-D, and exceptions by name."""
    both = dict.fromkeys(MATRICES, matrix) | dict.fromkeys(VECTORS, vector)
    return MappingProxyType(both | leaves)


SEQUENCE = ("ring", "ulysses")
EVERYWHERE = ("dp", "ring", "ulysses")

_ULYSSES = Table(
    name="ulysses",
    tokens=P("dp", SEQUENCE),
    residual=P("dp", SEQUENCE, None),
    attn_x=P("dp", SEQUENCE, None),
    q=P("dp", "ring", "ulysses", None),
    kv=P("dp", "ring", "ulysses", None),
    mlp_x=P("dp", SEQUENCE, None),
    rest=weights(P(EVERYWHERE, None), P(EVERYWHERE)),
    use=weights(P(None, None), P(None)),
)

_REPLICATED = Table(
    name="replicated",
    tokens=P("dp", None),
    residual=P("dp", None, None),
    attn_x=P("dp", None, None),
    q=P("dp", None, None, None),
    kv=P("dp", None, None, None),
    mlp_x=P("dp", None, None),
    rest=weights(P(None, None), P(None)),
    use=weights(P(None, None), P(None)),
)

TABLES: Mapping[str, Table] = MappingProxyType({t.name: t for t in (_ULYSSES, _REPLICATED)})
