"""Batches that the tests of models/ share. Spawned ranks import this: keep Transformers out of it."""

import torch
from torch import Tensor

from usp import Batch, Shard, shard_batch
from usp.mesh import TABLES

ONE = {"dp": 1, "ring": 1, "ulysses": 1}
TABLE = TABLES["ulysses"]
SEQ = 23  # not a multiple of any mesh
CUTS: dict[str, list[list[int]]] = {
    "whole rows": [[0, SEQ], [0, SEQ]],
    "packed": [[0, 5, 6, 17, SEQ], [0, 11, SEQ]],  # documents end inside shards, one has a single token
}


def tokens_of(batch: int, seq_len: int, vocab: int = 101) -> Tensor:
    return torch.randint(vocab, (batch, seq_len), generator=torch.Generator().manual_seed(7))


def whole(tokens: Tensor) -> Shard:
    """The batch as one process sees it: one document per row."""
    batch = Batch(tokens=tokens, labels=None, cu_seqlens=None, valid=None)
    return shard_batch(batch, table=TABLE, mesh=ONE)


def two_rows(case: str | int) -> Batch:
    """[2, 23] with masked labels; cut over 4 ranks, one has no valid label in the second row.

    A number: so many tokens a row and nothing else, no id of them 0.
    """
    if isinstance(case, int):
        return Batch(tokens=1 + tokens_of(2, case, 100))
    tokens = tokens_of(2, SEQ)
    labels = tokens.clone()
    labels[0, 8:12] = -100
    labels[1, 3] = -100
    labels[1, 17:] = -100
    return Batch(
        tokens=tokens, labels=labels, cu_seqlens=tuple(torch.tensor(c) for c in CUTS[case]), valid=None
    )
