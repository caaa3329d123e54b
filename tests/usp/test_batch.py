"""What may be in a batch: everything else is refused by name, other kinds of whole numbers are taken."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.usp.test_data import BATCHES, ONE, tokens_of
from usp import Batch, shard_batch
from usp.mesh import TABLES

T = tokens_of(2, 6)
BAD: dict[str, Any] = {
    "tokens=.12,. torch.int64 must be whole numbers .B, S.": Batch(T.flatten()),
    "tokens=.2, 0. .* must .* with B and S at least 1": Batch(T[:, :0]),
    "tokens=.0, 6. .* must .* with B and S at least 1": Batch(T[:0]),
    "tokens=.2, 6. torch.float32 must be whole numbers": Batch(T.float()),
    "tokens=.2, 6. torch.bool must be whole numbers": Batch(T > 3),
    "tokens=list must be whole numbers": Batch(T.tolist()),  # type: ignore[arg-type]
    "tokens=-84 must be 0 or more": Batch(-T),
    "labels=.2, 5. torch.int64 must .* the shape of tokens": Batch(T, labels=T[:, 1:]),  # shifted by hand
    "labels=.2, 6. torch.float64 must": Batch(T, labels=T.double()),
    "labels=-7 must be 0 or more, or -100": Batch(T, labels=T.where(T != 14, -7)),
    "valid=.1, 6. .* must be bool in the shape": Batch(T, valid=torch.ones(1, 6, dtype=torch.bool)),
    "valid=.2, 6. torch.float32 must be bool": Batch(T, valid=torch.ones(2, 6)),  # a mask to be added
    "valid=2 must be 0 or 1": Batch(T, valid=torch.full((2, 6), 2)),  # numbers of documents
    "one entry per row, got 1 for B=2": Batch(T, cu_seqlens=[[0, 6]]),
    "one entry per row, got .3,. torch.int64 for B=2": Batch(
        T,
        cu_seqlens=torch.tensor([0, 6, 12]),  # type: ignore[arg-type]
    ),
    "one entry per row, got int for B=2": Batch(T, cu_seqlens=6),  # type: ignore[arg-type]
    "cu_seqlens.0.=.0. must be whole numbers that rise": Batch(T, cu_seqlens=[0, 6]),  # type: ignore[list-item]
    "cu_seqlens.1.=.0, 5. must .* rise from 0 to S, got S=6": Batch(T, cu_seqlens=[[0, 6], [0, 5]]),
    "cu_seqlens.0.=.0, 3, 3, 6.": Batch(T, cu_seqlens=[[0, 3, 3, 6], [0, 6]]),
    "cu_seqlens.0.=.1, 6.": Batch(T, cu_seqlens=[[1, 6], [0, 6]]),
    "cu_seqlens.0.=.0, 7, 6.": Batch(T, cu_seqlens=[[0, 7, 6], [0, 6]]),
    "cu_seqlens.1.=..": Batch(T, cu_seqlens=[[0, 6], []]),
    "cu_seqlens.0.=.0.0, 2.5, 6.0. must be whole": Batch(T, cu_seqlens=[torch.tensor([0, 2.5, 6]), [0, 6]]),
    "Pad on the right": Batch(T, valid=torch.tensor([[0, 1, 1, 1, 1, 1]] * 2).bool()),
}


@pytest.mark.parametrize("message", BAD)
def test_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_batch(BAD[message], table=TABLES["ulysses"], mesh=ONE)


def test_other_kinds_of_whole_numbers() -> None:
    """What a tokenizer, numpy or a collator makes of the same batch gives the same shard."""
    want = shard_batch(BATCHES["all at once"], table=TABLES["ulysses"], mesh=ONE)
    tokens, labels, bounds, valid = BATCHES["all at once"]
    assert labels is not None
    assert bounds is not None
    assert valid is not None
    edges: Any = [np.array(bounds[0]), torch.tensor(bounds[1], dtype=torch.int16)]
    other = Batch(tokens.int(), labels.short(), edges, valid.long())
    got = shard_batch(other, table=TABLES["ulysses"], mesh=ONE)
    for field, value in want._asdict().items():
        same = torch.equal(getattr(got, field), value) if isinstance(value, Tensor) else None
        assert same or getattr(got, field) == value, field
    assert got.tokens.dtype == got.labels.dtype == torch.int64
