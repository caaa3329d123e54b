"""DeepSpeed's ZeRO around a model whose sequences are cut over the ranks: its engine, your loop.

    torchrun --nproc-per-node 2 -m usp.tools.examples.deepspeed_engine --model runs/quickstart/model

Every rank passes the same batch and the model cuts it. ZeRO cuts optimizer state (--stage 1), gradients (2)
and parameters (3) over all ranks, those of one sequence too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import tyro

from usp.mesh import build_mesh
from usp.models.hf import BridgedCausalLM
from usp.models.hf.deepspeed import deepspeed_engine, whole_parameters
from usp.models.hf.inputs import count_targets
from usp.tools.examples.docs import micro_batches
from usp.tools.examples.start import ranks, say


def main(
    *,
    model: Path,
    out: Path = Path("runs/deepspeed"),
    steps: int = 10,
    ring: int = 1,
    stage: Literal[1, 2, 3] = 2,
    lr: float = 1e-4,
) -> list[float]:
    """Train on questions and answers; returns the loss of each step."""
    mesh = build_mesh(ring=ring, ulysses=dist.get_world_size() // ring)
    net = BridgedCausalLM.from_pretrained(model, mesh=mesh, dtype=torch.float32, whole=True, averaged=True)
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 1.0}
    engine = deepspeed_engine(net, config=config, optimizer=torch.optim.AdamW(net.parameters(), lr=lr))
    batches, losses = micro_batches(model), []
    for step in range(steps):
        parts = [batches[(2 * step + i) % len(batches)] for i in range(2)]
        count = sum(count_targets(part) for part in parts)  # every token of the step weighs the same
        losses.append(0.0)
        for part in parts:
            engine.set_gradient_accumulation_boundary(part is parts[-1])
            loss = engine(**part, num_items_in_batch=count).loss
            engine.backward(loss)
            losses[-1] += float(loss.detach())
        engine.step()
        say(f"step {step + 1}: loss {losses[-1]:.4f}, gradient norm {engine.get_global_grad_norm():.3f}")
    with whole_parameters(engine) as whole:
        whole.save_pretrained(out / "hf", is_main_process=dist.get_rank() == 0)
    return losses


if __name__ == "__main__":
    with ranks():
        losses = tyro.cli(main)
