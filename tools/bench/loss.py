"""The fused loss by size of its tiles, against torch's own and its floor: the three products alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from usp import linear_cross_entropy
from usp.tools.bench.job import Job
from usp.tools.bench.peers import hugging_face as hf
from usp.tools.bench.place import Place
from usp.tools.bench.shape import shape
from usp.tools.bench.timing import held, timed

TILES = (1024, 2048, 4096, 8192)


def run(job: Job, place: Place) -> None:
    cfg, device = shape(job.model, job.layers), place.device
    for seq_len in sorted(job.seq_lens):
        x = torch.randn(seq_len, cfg.hidden_size, device=device, dtype=place.dtype)
        weight = torch.randn(cfg.vocab_size, cfg.hidden_size, device=device, dtype=place.dtype) * 0.02
        labels = torch.randint(cfg.vocab_size, (seq_len,), device=device)
        lowest = 0.0
        for label, step in ways(x, weight, labels, place):
            row = {**job.facts(), "label": label, "seq_len": seq_len}
            try:
                before = held(device)
                if before is not None:
                    torch.cuda.reset_peak_memory_stats(device)
                took = timed(step, device, num=5)
                lowest = lowest or took.device
                row |= {"ms": took.device, "host_ms": took.host, "over_floor": took.device / lowest}
                if before is not None:
                    row["peak"] = torch.cuda.max_memory_allocated(device) - before
            except torch.OutOfMemoryError as e:
                row["error"] = f"out of memory: {str(e)[:160]}"
            place.emit(row)


def sizes_of_tiles(tokens: int) -> list[int]:
    """Those that differ on so many tokens."""
    return [tile for tile in TILES if tile < tokens] + [tile for tile in TILES if tile >= tokens][:1]


def ways(
    x: Tensor, weight: Tensor, labels: Tensor, place: Place
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Loss and gradients of x and weight, by name; the floor first."""
    x, weight = x.requires_grad_(), weight.requires_grad_()

    def floor(tile: int = 4096) -> Tensor:
        total = torch.zeros_like(weight)
        for part in torch.split(x.detach(), tile):
            logits = part @ weight.detach().T
            torch.mm(logits, weight.detach())
            total.addmm_(logits.T, part)
        return total

    yield "floor: three products", floor
    for tile in sizes_of_tiles(x.shape[0]):

        def fused(tile: int = tile) -> object:
            total = linear_cross_entropy(x, weight, labels, tile=tile)
            return torch.autograd.grad(total / labels.numel(), (x, weight))

        yield f"usp, tiles of {tile}", fused
    if hf.have_liger(place):
        liger: Any = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()

        def by_liger() -> object:
            return torch.autograd.grad(liger(weight, x, labels), (x, weight))

        yield "liger", by_liger

    def by_torch() -> object:
        return torch.autograd.grad(F.cross_entropy((x @ weight.T).float(), labels), (x, weight))

    yield "torch", by_torch
