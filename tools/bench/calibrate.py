"""This machine's rates, for the times that `usp plan` prints: see `usp.tools.rates`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from usp.tools.bench.job import Job, Row
from usp.tools.bench.kernel import rates as kernel_rates
from usp.tools.bench.place import Place, kernel_name
from usp.tools.bench.shape import shape
from usp.tools.bench.timing import timed
from usp.tools.flops import device_name


def run(job: Job, place: Place) -> None:
    """One row with the fields of `Rates`."""
    cfg, cuda = shape(job.model, job.layers), place.device.type == "cuda"
    kernel = kernel_name("auto", cfg, place)
    tokens, length, nbytes = (16384, 32768, 2**30) if cuda else (512, 512, 2**22)
    attention = kernel_rates(cfg, place, kernel, length, packed=False)
    found: Row = {
        "device": device_name(place.device),
        "processes": place.world,
        "kernel": kernel,
        "matmul": matmul(tokens, cfg.hidden_size, cfg.intermediate_size, place),
        "attention_forward": 1e12 * attention["forward_tflops"],
        "attention_backward": 1e12 * attention["backward_tflops"],
        **copies(nbytes, place),
    }
    if place.world > 1:
        found |= collectives(nbytes // 4, place)
    place.emit({**job.facts(), "rates": found})


def matmul(tokens: int, d: int, f: int, place: Place) -> float:
    """FLOP/s of the MLP's product and of that for its weight's gradient, together."""
    x = torch.randn(tokens, d, device=place.device, dtype=place.dtype)
    y = torch.randn(tokens, f, device=place.device, dtype=place.dtype)
    w = torch.randn(f, d, device=place.device, dtype=place.dtype)

    def both() -> None:
        torch.mm(x, w.T)
        torch.mm(y.T, x)

    return 4.0 * tokens * d * f / timed(both, place.device).device * 1e3


def copies(nbytes: int, place: Place) -> Row:
    """Bytes per second on the device, counted as read and written, and between it and page-locked memory."""
    cuda = place.device.type == "cuda"
    # written once: the CPU reads pages that never were from one page of zeros
    here, there = (torch.ones(nbytes, dtype=torch.uint8, device=place.device) for _ in range(2))
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=cuda)
    ways: dict[str, tuple[int, Callable[[], Any]]] = {
        "memory": (2 * nbytes, lambda: there.copy_(here)),
        "to_host": (nbytes, lambda: host.copy_(here, non_blocking=True)),
        "from_host": (nbytes, lambda: here.copy_(host, non_blocking=True)),
    }
    return {name: num / timed(way, place.device).device * 1e3 for name, (num, way) in ways.items()}


def collectives(nbytes: int, place: Place) -> Row:
    """Bytes that one rank sends per second. `nbytes`: what it holds of all ranks' together."""
    world, part = place.world, nbytes // place.world
    sent = part * (world - 1)
    whole = torch.empty(part * world // 2, dtype=torch.bfloat16, device=place.device)
    own, other = whole[: part // 2].clone(), torch.empty_like(whole)
    ways: dict[str, Callable[[], Any]] = {
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, own),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole),
    }
    return {name: sent / timed(way, place.device).device * 1e3 for name, way in ways.items()}
