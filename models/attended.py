"""With how many heads a rank attends, all at once or by chunks, and to how many keys, in numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from usp.deal import Deal, with_equal_groups
from usp.head_chunks import deal_chunks
from usp.models.config import LlamaConfig


class Heads(NamedTuple):
    """Query and kv heads that one rank attends with."""

    q: int
    kv: int


def attended(deal: Deal, group: int) -> Heads:
    """Heads of `deal` once kv heads are repeated where that is needed, see `with_equal_groups`."""
    kv = torch.empty(1, 1, deal.kv_stop - deal.kv_start, 1, device="meta")
    return Heads(deal.q_stop - deal.q_start, with_equal_groups(kv, kv, deal, group)[0].shape[2])


@lru_cache(maxsize=64)  # asked in every layer
def ring_heads(num_heads: int, num_kv_heads: int, parts: int, num_chunks: int) -> Heads:
    """Heads by which a ring decides how keys travel, for all chunks of all `parts` ranks alike.

    Those of the chunk with the most keys beside its queries: where all keys take no more room than q there,
    they take no more in any other.
    """
    chunks = deal_chunks(num_heads, num_kv_heads, parts, num_chunks)
    each = {attended(deal, num_heads // num_kv_heads) for chunk in chunks for deal in chunk.deals}
    return max((heads for heads in each if heads.q), key=lambda h: (h.kv / h.q, h))


def mean_keys(cfg: LlamaConfig, seq_len: int, layers: Sequence[int] | None = None) -> float:
    """Keys that a query sees, in the mean over the queries of a row and over `layers` (default: all; no
    layers: 0), for work that is counted. The row is one causal document of `seq_len` = S tokens.

    S / 2, by the custom that counts half of the square, and W (1 - W / (2 S)) in a layer with a window of
    W < S keys, in which the square of the first W tokens is counted half too. Key by key it is 1/2 more, and
    W / (2 S) more: the diagonal's other half.
    """
    reach = [min(cfg.window_of(i) or seq_len, seq_len) for i in range(cfg.num_layers)]
    reach = reach if layers is None else [reach[i] for i in layers]
    return sum(w * (1 - w / (2 * seq_len)) for w in reach) / max(1, len(reach))
