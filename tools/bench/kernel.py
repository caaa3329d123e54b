"""Attention kernels on one device, forward and backward, causal and with packed documents."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from usp.kernels import KERNELS, Segments, choose
from usp.models import LlamaConfig
from usp.tools.bench.job import Job, Row
from usp.tools.bench.place import Place
from usp.tools.bench.shape import shape
from usp.tools.bench.timing import timed

DOCUMENTS = 8
SLOW_FROM = 32768  # tokens from which a kernel in plain torch is left out


def run(job: Job, place: Place) -> None:
    cfg = shape(job.model, job.layers)
    for name, seq_len in ((name, seq_len) for name in KERNELS for seq_len in sorted(job.seq_lens)):
        if place.device.type not in KERNELS[name].devices:
            continue
        for label in ("causal", "packed"):
            row = {**job.facts(), "label": label, "kernel": name, "seq_len": seq_len}
            try:
                place.emit({**row, **rates(cfg, place, name, seq_len, packed=label == "packed")})
            except (ValueError, torch.OutOfMemoryError) as e:
                place.emit({**row, "error": str(e).split("\n")[0][:200]})


def segments(seq_len: int, scale: float, *, packed: bool) -> Segments:
    """One causal document, or `DOCUMENTS` that grow in length."""
    total = DOCUMENTS * (DOCUMENTS + 1) // 2
    ends = [seq_len * i * (i + 1) // 2 // total for i in range(DOCUMENTS + 1)] if packed else [0, seq_len]
    return Segments(tuple(ends), tuple(ends), None, 0, scale)


def forward_flops(cu: tuple[int, ...], num_heads: int, head_dim: int) -> float:
    """Of the two products over the causal half of each document."""
    return 2.0 * num_heads * head_dim * sum((b - a) ** 2 for a, b in pairwise(cu))


def rates(cfg: LlamaConfig, place: Place, name: str, seq_len: int, *, packed: bool) -> Row:
    """TFLOP/s, the backward counted as 2.5 forwards. ValueError when the kernel does not take it."""
    size, device = cfg.head_dim, place.device
    one = segments(seq_len, size**-0.5, packed=packed)
    if name == "tiled" and seq_len >= SLOW_FROM and device.type == "cuda":
        raise ValueError(f"not tried: plain torch from {SLOW_FROM} tokens on")
    kernel = choose(name, device=device, dtype=place.dtype, size=size, v_size=size, features=one.features)

    def randn(num: int) -> Tensor:
        return torch.randn(seq_len, num, size, device=device, dtype=place.dtype)

    q, k, v, do = (randn(n) for n in (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads, cfg.num_heads))
    num = 10 if seq_len <= 65536 else 3
    with torch.no_grad():
        o, lse = kernel.forward(q, k, v, one)
        forward = timed(lambda: kernel.forward(q, k, v, one), device, num)
        backward = timed(lambda: kernel.backward(do, q, k, v, o, lse, one), device, num)
    flops = forward_flops(one.cu_q, cfg.num_heads, size)
    return {
        "dtype": str(place.dtype).removeprefix("torch."),
        "forward_ms": forward.device,
        "backward_ms": backward.device,
        "forward_tflops": flops / forward.device / 1e9,
        "backward_tflops": 2.5 * flops / backward.device / 1e9,
        "host_ms": forward.host,
    }
