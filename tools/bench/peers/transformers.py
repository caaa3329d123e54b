"""Plain Transformers on one process: float32 parameters, autocast, fused AdamW, Liger's parts if there."""

from __future__ import annotations

import torch
from torch import Tensor

from usp.tools.bench.job import Job
from usp.tools.bench.peers import hugging_face as hf
from usp.tools.bench.place import Place, kernel_name
from usp.tools.bench.shape import shape


def run(job: Job, place: Place) -> None:
    cfg, liger, device = shape(job.model, job.layers), hf.have_liger(place), place.device
    kernel = kernel_name(job.kernel, cfg, place)
    seen = hf.register(cfg, hf.by_kernel(kernel, place.dtype))
    if liger:
        hf.use_liger(cfg)
    model = hf.build(cfg, place, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")

    def prepare(variant: str, seq_len: int, every: int) -> hf.Prepared:
        if variant == "least":
            raise ValueError("Transformers has nothing but recomputation to save memory with")
        again = hf.checkpointing(model, every)
        ids, labels, positions = hf.tokens(cfg, seq_len, device)

        def step() -> Tensor:
            with torch.autocast(device.type, place.dtype, enabled=place.dtype != torch.float32):
                x = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
                loss = hf.mean_loss(model, x, labels, liger=liger)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert seen.tokens == [seq_len], "attention must see the whole sequence"
            return loss.detach()

        by = {"mlp": "liger" if liger else "torch", "loss_by": "liger" if liger else "tiles"}
        return step, {"kernel": kernel, "again": again, **by}

    hf.run_variants(job, place, prepare)
