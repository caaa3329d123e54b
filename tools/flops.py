"""The work that one token takes, and the rate that a device could do it at: for bench, train and plans."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from usp.models import LlamaConfig
from usp.models.attended import mean_keys

PEAKS: Mapping[str, float] = MappingProxyType(
    {
        "GB200": 2.5e15, "B200": 2.25e15, "GH200": 9.89e14, "H200": 9.89e14, "H200 NVL": 8.35e14,
        "H100": 9.89e14, "H100 NVL": 8.35e14, "H100 PCIe": 7.56e14, "A100": 3.12e14,
    }
)  # fmt: skip
"""Dense bfloat16 FLOP/s of the data sheets, by words of the device's name; without a form, that of SXM."""


def weights(cfg: LlamaConfig) -> tuple[int, int]:
    """Matrix entries that a token is multiplied with: of one layer, and of the head."""
    d, f, h = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    return d * h * (2 * cfg.num_heads + 2 * cfg.num_kv_heads) + 3 * d * f, cfg.vocab_size * d


def flops_per_token(cfg: LlamaConfig, seq_len: int) -> float:
    """6 N + 12 L H d keys, forward and backward; nothing that is computed again.

    N: matrix entries without the input embedding. L layers of H heads of size d. keys: how many a query sees
    on average over a row of `seq_len` = S tokens, taken as one document, and over the layers (`mean_keys`):
    S / 2, or W (1 - W / (2 S)) in a layer with a window of W < S.
    """
    layer, head = weights(cfg)
    attention = cfg.num_layers * cfg.num_heads * cfg.head_dim * mean_keys(cfg, seq_len)
    return 6 * (cfg.num_layers * layer + head) + 12 * attention


def device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "CPU"


def peak_flops(device: str) -> float | None:
    """FLOP/s of the device of this name; None for one that `PEAKS` does not know, such as a CPU."""
    words = device.replace("-", " ").split()
    known = [part for part in PEAKS if set(part.split()) <= set(words)]
    return PEAKS[max(known, key=len)] if known and "MIG" not in words else None


def utilization(cfg: LlamaConfig, seq_len: int, tokens: float, device: torch.device) -> dict[str, float]:
    """What `tokens` per second and process come to: `tflops`, model TFLOP/s (`flops_per_token`), and where
    the device's peak is known `mfu`, their share of it."""
    flops = flops_per_token(cfg, seq_len) * tokens
    peak = peak_flops(device_name(device))
    return {"tflops": flops / 1e12, **({"mfu": flops / peak} if peak else {})}
