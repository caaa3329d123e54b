"""What one rank does with small models under every scheme; one process beside it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.mesh.cases import Sizes, mesh_of, outside
from tests.models.batches import ONE, TABLE, two_rows
from tests.models.run_model import Result, run
from tests.schemes import SCHEMES
from tests.usp.dense import Watch
from usp import Batch, shard_batch, unshard_batch, value_and_grad
from usp.models import LlamaConfig, init, logits, loss


def _config(num_heads: int, num_kv_heads: int, **fields: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=101, hidden_size=24, intermediate_size=36, num_layers=2, num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=4, init_std=0.3, **fields,
    )  # fmt: skip


CONFIGS: dict[str, LlamaConfig] = {
    "9/3": _config(9, 3, qk_norm=True, o_bias=True),
    "3/1 tied": _config(3, 1, tie_embeddings=True, qkv_bias=True, mlp_bias=True),
    "windows": _config(6, 2, windows=(5, None), qkv_bias=True),
    "windows alike": _config(3, 3, windows=(1, 9)),
    "30/10": _config(30, 10),
    "many keys": _config(4, 4),
    "one key": _config(4, 1),
}


class Scheme(NamedTuple):
    """Degrees, table, model, batch (a name or a number of tokens), remat, parts of heads, tile of the MLP."""

    sizes: Sizes
    table: str
    model: str
    case: str | int
    remat: str = "none"
    head_chunks: int = 1
    mlp_tile: int | None = None


def on_ranks(schemes: list[Scheme]) -> list[Result | None]:
    """Gradients and logits from the first rank of each mesh alone."""
    return [_on_rank(one) for one in schemes]


def _on_rank(one: Scheme) -> Result | None:
    mesh, cfg, table = mesh_of(one.sizes), CONFIGS[one.model], SCHEMES[one.table]
    if outside(mesh):
        return None
    params = init(cfg, seed=1, dtype=torch.float64, table=table, mesh=mesh)
    result = run(params, cfg, mesh, table, one.case, one.remat, one.head_chunks, one.mlp_tile)
    first = not any(mesh.get_coordinate() or ())
    return result if first else Result(result.loss, {}, result.logits[:0])


def alone(model: str, case: str | int) -> Result:
    """One process, plain torch."""
    cfg = CONFIGS[model]
    return run(init(cfg, seed=1, dtype=torch.float64), cfg, ONE, TABLE, case, "none")


def leaks(one: Scheme) -> tuple[bool, bool]:
    """Whether a change of one document's tokens changed its logits, and those of any other document."""
    mesh, cfg, table = mesh_of(one.sizes), CONFIGS[one.model], SCHEMES[one.table]
    params = init(cfg, seed=1, dtype=torch.float64, table=table, mesh=mesh)
    batch = two_rows("packed")

    def out(batch: Batch) -> Tensor:
        shard = shard_batch(batch, table=table, mesh=mesh)
        with torch.no_grad():
            found = logits(params, shard, cfg, table=table, mesh=mesh, head_chunks=one.head_chunks)
        return unshard_batch(found, shard, table=table, mesh=mesh)

    before = out(batch)
    inside = outside_ = False
    for row, start, stop in ((0, 0, 5), (0, 5, 6), (0, 6, 17), (1, 11, 23)):
        tokens = batch.tokens.clone()
        tokens[row, start:stop] = (tokens[row, start:stop] + 1) % 101
        changed = (out(batch._replace(tokens=tokens)) != before).any(2)
        inside = inside or bool(changed[row, start:stop].any())
        changed[row, start:stop] = False
        outside_ = outside_ or bool(changed.any())
    return inside, outside_


def largest(model: str, sizes: Sizes, table: str, seq_len: int) -> int:
    """Elements of the largest tensor of a whole step: loss and gradients of one row of `seq_len` tokens."""
    mesh, cfg = mesh_of(sizes), CONFIGS[model]
    params = init(cfg, seed=1, table=SCHEMES[table], mesh=mesh)
    tokens = torch.randint(101, (1, seq_len), generator=torch.Generator().manual_seed(0))
    shard = shard_batch(Batch(tokens), table=SCHEMES[table], mesh=mesh)
    with Watch() as watch:
        value_and_grad(lambda p: loss(p, shard, cfg, table=SCHEMES[table], mesh=mesh, remat="full"))(params)
    return watch.largest
