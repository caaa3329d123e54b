"""DPO on sequences that are cut: log-probabilities of whole answers, summed over the ranks that share them.

    torchrun --nproc-per-node 2 -m usp.tools.examples.dpo --model runs/quickstart/model

Only one number an answer travels. Any loss of such sums (rewards, policy gradients) is written like this.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import tyro

from usp import adamw_init, adamw_update, models, reduce_grads, shard_batch, value_and_grad
from usp.mesh import TABLES, build_mesh
from usp.models.gather import in_use
from usp.sequence_loss import document_ids, dpo_loss, sequence_log_probs, share
from usp.tools.examples.docs import pairs
from usp.tools.examples.start import ranks, say


def main(*, model: Path, steps: int = 5, ring: int = 1, lr: float = 1e-5) -> list[float]:
    """Prefer the right answer to that of another question; returns the loss of each step."""
    mesh, table = build_mesh(ring=ring, ulysses=dist.get_world_size() // ring), TABLES["usp"]
    cfg, params = models.from_hf(model, table=table, mesh=mesh, dtype=torch.float32, device=mesh.device_type)
    batch = pairs(model)  # chosen and rejected in turn, each a document of one long row
    shard = shard_batch(batch, table=table, mesh=mesh)
    ids, num = document_ids(batch, shard, table=table, mesh=mesh)

    def log_probs(params: models.Params) -> torch.Tensor:
        x = models.hidden(params, shard, cfg, table=table, mesh=mesh)
        (head,) = in_use(params, ("embed" if cfg.tie_embeddings else "lm_head",), cfg, table, mesh, None)
        return sequence_log_probs(x, head, shard, ids, num, table=table, mesh=mesh)

    with torch.no_grad():
        reference = log_probs(params)
    specs, state, losses = models.param_specs(cfg, table), adamw_init(params), []
    for step in range(steps):
        loss, grads = value_and_grad(lambda p: share(dpo_loss(log_probs(p), reference), mesh))(params)
        params, state = adamw_update(params, reduce_grads(grads, specs, mesh), state, lr=lr)
        dist.all_reduce(loss)  # the loss is the sum over ranks
        losses.append(float(loss))
        say(f"step {step + 1}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    with ranks():
        losses = tyro.cli(main)
