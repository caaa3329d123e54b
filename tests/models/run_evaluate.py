"""What one rank does in the tests of evaluation. Spawned ranks import this: keep Transformers out of it."""

from pathlib import Path
from typing import Any

import torch

from usp import Batch, shard_batch
from usp.mesh import TABLES, build_mesh
from usp.models import Evaluation, evaluate, from_hf, loss

VOCAB = 101


def batches() -> list[Batch]:
    """3 rows of 23 tokens with masked labels, 1 row of 7, packed documents, rows without any label."""
    generator = torch.Generator().manual_seed(5)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(VOCAB, shape, generator=generator)

    first = tokens(3, 23)
    labels = first.clone()
    labels[0, 3:11] = -100
    labels[2, 5:] = -100  # most ranks have nothing to add
    packed = tokens(2, 17)
    nothing = tokens(2, 9)
    ends = torch.ones(2, 17, dtype=torch.bool)
    ends[1, 12:] = False
    return [
        Batch(first, labels),
        Batch(tokens(1, 7)),
        Batch(packed, cu_seqlens=[[0, 5, 17], [0, 17]], valid=ends),
        Batch(nothing, torch.full_like(nothing, -100)),
        Batch(tokens(1, 2)),
    ]


def on_rank(folder: Path, degrees: dict[str, int], name: str, options: dict[str, Any]) -> Evaluation:
    mesh, table = build_mesh(**degrees, device_type="cpu"), TABLES[name]
    cfg, params = from_hf(folder, table=table, mesh=mesh, dtype=torch.float64)
    found = evaluate(params, batches(), cfg, table=table, mesh=mesh, **options)
    again = evaluate(params, batches()[1:2], cfg, table=table, mesh=mesh)
    assert again.num_tokens == 6
    if degrees["dp"] == 1:  # training divides the same float64 sum, in another order, by the count
        shard = shard_batch(batches()[1], table=table, mesh=mesh)
        mean = loss(params, shard, cfg, table=table, mesh=mesh).detach()
        torch.distributed.all_reduce(mean)
        torch.testing.assert_close(float(mean), again.loss, rtol=1e-12, atol=0)
    return found
