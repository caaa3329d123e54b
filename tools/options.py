"""How the layers of a training step run: what the options say, or what the memory allows."""

from __future__ import annotations

import os
from typing import Any

import torch

from usp.arena import Arena, available_bytes
from usp.models.plan.settings import choose_settings
from usp.tools.config import Train
from usp.tools.config_plan import Plan
from usp.tools.ranks import Ranks
from usp.tools.setup import Setup

GIVEN = {"group": 1, "offload": "none", "mlp_tile": None, "head_chunks": 1}


def check_options(cfg: Train | Plan) -> None:
    """The rules that need nothing but the options. Raises ValueError."""
    for name in ("group", "head_chunks"):
        if getattr(cfg, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"{name}={getattr(cfg, name)} must be at least 1. Change --{flag}.")
    if cfg.mlp_tile is not None and cfg.mlp_tile < 1:
        raise ValueError(f"mlp_tile={cfg.mlp_tile} must be at least 1. Change --mlp-tile.")
    if cfg.remat == "none" and (cfg.group != 1 or cfg.offload != "none"):
        raise ValueError(
            f"remat=none must come without groups and offload, got group={cfg.group} offload={cfg.offload}. "
            "Change --remat."
        )
    given = [name for name, default in GIVEN.items() if getattr(cfg, name) != default]
    if cfg.remat == "auto" and given:
        raise ValueError(
            f"remat=auto must come without {', '.join(given)}, which it chooses. Name a --remat, or leave "
            f"them out."
        )


def step_options(cfg: Train, setup: Setup, ranks: Ranks) -> dict[str, Any]:
    """Keyword arguments of `models.loss`, the same on every rank. Raises ValueError when nothing fits.

    remat=auto: on a GPU the first settings, in order of what they cost in time, that fit the smallest rank's
    memory; on the CPU, where memory is not the limit, each layer is computed again.
    """
    cuda = ranks.device.type == "cuda"
    compiled = cuda if cfg.compile == "auto" else cfg.compile == "on"
    options: dict[str, Any] = {name: getattr(cfg, name) for name in ("remat", *GIVEN)}
    options |= {"kernel": cfg.kernel, "dtype": setup.dtype, "compile": compiled}
    if cfg.remat == "auto":
        options |= _chosen(cfg, setup, ranks, compiled) if cuda else {"remat": "full"}
    options["arena"] = Arena() if options["offload"] == "host" else None
    return options


def _chosen(cfg: Train, setup: Setup, ranks: Ranks, compiled: bool) -> dict[str, Any]:
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpu = torch.cuda.get_device_properties(ranks.device).total_memory
    found = ranks.exchange((gpu, (available_bytes() or 0) // on_host))
    gpu_bytes, host_bytes = (min(sizes) for sizes in zip(*found, strict=True))
    sizes = {"dp": cfg.dp, "ring": cfg.ring, "ulysses": cfg.ulysses}
    settings = ranks.checked(
        lambda: choose_settings(
            setup.model, setup.table, sizes, cfg.seq_len, gpu_bytes, host_bytes,
            dtype=setup.dtype, compile=compiled, batch=setup.num_rows // cfg.accumulate,
            accumulate=cfg.accumulate,
        )
    )  # fmt: skip
    if ranks.first:
        chosen = f"chosen for {gpu_bytes / 2**30:.0f} GiB a GPU: {settings.describe()}"
        print(chosen, *settings.reasons, sep="\n  ", flush=True)
    return settings.options()
