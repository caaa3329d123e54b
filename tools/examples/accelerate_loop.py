"""A loop of your own under Accelerate: prepare, backward, clip, save_state, with every sequence cut.

    torchrun --nproc-per-node 2 -m usp.tools.examples.accelerate_loop --model runs/quickstart/model

Every rank passes the same batch and the model cuts it, so there is no data loader to prepare.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from accelerate import Accelerator

from usp.mesh import build_mesh
from usp.models.hf import BridgedCausalLM
from usp.models.hf.inputs import count_targets
from usp.tools.examples.docs import micro_batches
from usp.tools.examples.start import ranks


def main(
    *, model: Path, out: Path = Path("runs/accelerate"), steps: int = 10, ring: int = 1, lr: float = 1e-4
) -> list[float]:
    """Train on questions and answers; returns the loss of each step."""
    # Without a GPU Accelerate has to be told to use the CPU, or it takes each rank for a run of its own.
    accelerator: Any = Accelerator(cpu=not torch.cuda.is_available())
    mesh, device = build_mesh(ring=ring, ulysses=dist.get_world_size() // ring), accelerator.device
    # averaged: DistributedDataParallel takes the mean of the ranks' gradients, not their sum
    net = BridgedCausalLM.from_pretrained(model, mesh=mesh, device=device, whole=True, averaged=True)
    engine, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=lr))
    batches, losses = micro_batches(model), []
    for step in range(steps):
        parts = [batches[(2 * step + i) % len(batches)] for i in range(2)]
        count = sum(count_targets(part) for part in parts)  # every token of the step weighs the same
        losses.append(0.0)
        for part in parts:
            with nullcontext() if part is parts[-1] else accelerator.no_sync(engine):
                loss = engine(**part, num_items_in_batch=count).loss
                accelerator.backward(loss)
            losses[-1] += float(loss.detach())
        norm = accelerator.clip_grad_norm_(engine.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step + 1}: loss {losses[-1]:.4f}, gradient norm {float(norm):.3f}")
    accelerator.save_state(str(out / "state"))
    net.save_pretrained(out / "hf", is_main_process=accelerator.is_main_process)
    return losses


if __name__ == "__main__":
    with ranks():
        losses = tyro.cli(main)
