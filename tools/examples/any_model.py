"""A Transformers causal model as it is, on this rank's part of every sequence, in a loop of your own.

    torchrun --nproc-per-node 2 -m usp.tools.examples.any_model

Without --model it is a small random Gemma 3, with a window on some layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from transformers import AutoConfig, AutoModelForCausalLM

from usp.mesh import TABLES, build_mesh
from usp.models.hf import sequence_parallel
from usp.tools.examples.docs import micro_batches
from usp.tools.examples.start import ranks, say

SMALL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def main(*, model: Path | None = None, steps: int = 10, ring: int = 1, lr: float = 1e-3) -> list[float]:
    """Train on questions and answers; returns the loss of each step."""
    mesh = build_mesh(ring=ring, ulysses=dist.get_world_size() // ring)
    torch.manual_seed(0)  # the same weights on every rank
    Auto: Any = AutoModelForCausalLM
    if model is None:
        net = Auto.from_config(AutoConfig.for_model("gemma3_text", **SMALL))
    else:
        net = Auto.from_pretrained(model)
    batches = micro_batches(model)
    optimizer = torch.optim.AdamW(net.to(mesh.device_type).parameters(), lr=lr)
    losses = []
    with sequence_parallel(net, mesh=mesh, table=TABLES["usp"]) as sp:
        for step in range(steps):
            loss: Any = sp.loss(sp.shard(batches[step % len(batches)]))
            loss.backward()
            sp.reduce_grads()
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            say(f"step {step + 1}: loss {losses[-1]:.4f}, gradient norm {float(norm):.3f}")
    return losses


if __name__ == "__main__":
    with ranks():
        losses = tyro.cli(main)
