"""The functional way, as in JAX: parameters are a tree, a step is a function, the optimizer too.

    torchrun --nproc-per-node 2 -m usp.tools.examples.functional --model runs/quickstart/model

Parameters and optimizer state are cut over all ranks; `--ring 2` passes keys and values around instead of
trading heads. `python -m usp.tools.train` is this loop with checkpoints, metrics and more options.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

import usp
from usp import Shard, models
from usp.accumulate import accumulate, split_batch
from usp.mesh import TABLES, build_mesh
from usp.tools.examples.docs import docs
from usp.tools.examples.start import ranks, say
from usp.tools.text import Packed, encode, load_tokenizer


def main(
    *, model: Path, out: Path = Path("runs/functional"), steps: int = 10, ring: int = 1, lr: float = 1e-4
) -> list[float]:
    """Train on packed questions and answers; returns the loss of each step."""
    if (out / "hf").exists():
        raise SystemExit(f"out={out} must not hold a model yet. Give another --out.")
    mesh, table = build_mesh(ring=ring, ulysses=dist.get_world_size() // ring), TABLES["usp"]
    cfg, params = models.from_hf(model, table=table, mesh=mesh, dtype=torch.float32, device=mesh.device_type)
    specs, state = models.param_specs(cfg, table), usp.adamw_init(params)
    texts = [f"{doc.question}\n{doc.answer}" for doc in docs()]
    data = Packed(docs=encode(texts, load_tokenizer(model), vocab_size=cfg.vocab_size), seq_len=512)

    def loss_fn(params: models.Params, shard: Shard) -> torch.Tensor:
        return models.loss(params, shard, cfg, table=table, mesh=mesh, remat="attention")

    losses = []
    for batch in islice(data.batches(2), steps):
        shards = [usp.shard_batch(part, table=table, mesh=mesh) for part in split_batch(batch, 2)]
        loss, grads = accumulate(usp.value_and_grad(loss_fn), params, shards)
        dist.all_reduce(loss)  # the loss is the sum over ranks
        grads = usp.reduce_grads(grads, specs, mesh)
        grads, norm = usp.clip_by_global_norm(grads, specs, mesh, 1.0)
        params, state = usp.adamw_update(params, grads, state, lr=lr)
        losses.append(float(loss))
        say(f"step {len(losses)}: loss {losses[-1]:.4f}, gradient norm {float(norm):.3f}")
    models.to_hf(params, cfg, out / "hf", source=model, table=table, mesh=mesh)
    return losses


if __name__ == "__main__":
    with ranks():
        losses = tyro.cli(main)
