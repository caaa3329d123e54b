"""How the layers of a training step run: what the options say, or what the memory allows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from usp.arena import Arena
from usp.host import Room, rooms
from usp.mesh import axis_sizes, coordinates
from usp.models.options import check_how
from usp.models.plan.choose import choose_settings
from usp.models.plan.memory import training_memory
from usp.models.plan.settings import OPTIONS, gib, with_stored
from usp.tools.config import Train
from usp.tools.config_plan import Plan
from usp.tools.ranks import Ranks
from usp.tools.setup import Mesh, Setup

SPARE = 0.1  # of the host's memory
GIVEN = {"stored": 0, "group": 1, "offload": "none", "mlp_tile": None, "head_chunks": 1}


def check_options(cfg: Train | Plan) -> None:
    """The rules that need nothing but the options. Raises ValueError."""
    for name in ("group", "head_chunks"):
        if getattr(cfg, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"{name}={getattr(cfg, name)} must be at least 1. Change --{flag}.")
    if cfg.mlp_tile is not None and cfg.mlp_tile < 1:
        raise ValueError(f"mlp_tile={cfg.mlp_tile} must be at least 1. Change --mlp-tile.")
    if cfg.stored < 0:
        raise ValueError(f"stored={cfg.stored} must be 0 or more. Change --stored.")
    if cfg.remat == "none" and (cfg.group != 1 or cfg.offload != "none" or cfg.stored):
        raise ValueError(
            f"remat=none must come without groups, offload and stored, got group={cfg.group} offload="
            f"{cfg.offload} stored={cfg.stored}. Change --remat."
        )
    given = [name for name, default in GIVEN.items() if getattr(cfg, name) != default]
    if cfg.remat == "auto" and given:
        raise ValueError(
            f"remat=auto must come without {', '.join(given)}, which it chooses. Name a --remat, or leave "
            f"them out."
        )


def asked_for(cfg: Train | Plan, num_layers: int) -> dict[str, Any]:
    """Keyword arguments of `models.loss` by name, as they are given. ValueError for too many `stored`."""
    found = {name: getattr(cfg, name) for name in OPTIONS}
    return {**found, "remat": with_stored(cfg.remat, cfg.stored, num_layers)}


def step_options(cfg: Train, setup: Setup, mesh: Mesh, ranks: Ranks) -> dict[str, Any]:
    """Keyword arguments of `models.loss`, and `moments`, alike on every rank. ValueError when nothing fits.

    remat=auto: on a GPU the first settings, in order of what they cost in time, that fit the smallest rank's
    memory; on the CPU, where memory is not the limit, each layer is computed again. What goes to the host
    must fit there: that of all ranks of one machine, and of all those of one control group with a limit.
    """
    cuda = ranks.device.type == "cuda"
    compiled = cuda if cfg.compile == "auto" else cfg.compile == "on"
    options = ranks.checked(partial(asked_for, cfg, setup.model.num_layers))
    options["moments"] = "host" if cfg.moments == "host" else "device"
    options |= {"kernel": cfg.kernel, "dtype": setup.dtype, "compile": compiled}
    asked = "host" in (cfg.offload, cfg.moments) or (cfg.remat == "auto" and cuda)
    shared = ranks.exchange(rooms()) if asked else []  # by rank
    if cfg.remat == "auto":
        options |= _chosen(cfg, setup, ranks, compiled, shared) if cuda else {"remat": "full"}
    # what is free now, undivided: `check_host` compares with it what the ranks that share it need together
    room = min((room.free for room in shared[ranks.rank]), default=None) if shared else None
    options["arena"] = Arena(room) if options["offload"] == "host" else None
    of_loss: Any = {name: value for name, value in options.items() if name != "moments"}
    ranks.checked(partial(check_how, setup.model, table=setup.table, mesh=mesh, options=of_loss))
    if "host" in (options["offload"], options["moments"]):
        need = ranks.exchange(ranks.checked(partial(_host_bytes, cfg, setup, mesh, options)))
        what = "offload" if options["offload"] == "host" else "moments"
        ranks.checked(partial(check_host, shared, need, what))
    return options


def check_host(shared: list[list[Room]], need: list[int], what: str = "offload") -> None:
    """ValueError when the ranks that share some memory will together need more of it than there is."""
    for name in dict.fromkeys(room.name for mine in shared for room in mine):
        free = min(room.free for mine in shared for room in mine if room.name == name)
        there = [rank for rank, mine in enumerate(shared) if name in (room.name for room in mine)]
        total = sum(need[rank] for rank in there)
        if total > free * (1 - SPARE):
            raise ValueError(
                f"{what}=host must fit nine tenths of the host memory that is left, got {gib(total)} to "
                f"keep of {gib(free)} for ranks {there[0]} to {there[-1]}, which share it. Use more "
                f"machines, a shorter --seq-len, a larger --group, --remat full, --moments device, or no "
                f"--offload."
            )


def _host_bytes(cfg: Train, setup: Setup, mesh: Mesh, options: Mapping[str, Any]) -> int:
    """What this rank's step keeps on the host."""
    known = {name: value for name, value in options.items() if name != "arena"}
    memory = training_memory(
        setup.model, setup.table, axis_sizes(mesh), at=coordinates(mesh), seq_len=cfg.seq_len,
        batch=setup.num_rows // cfg.accumulate, accumulate=cfg.accumulate, **known,
    )  # fmt: skip
    return memory.host


def _chosen(
    cfg: Train, setup: Setup, ranks: Ranks, compiled: bool, shared: list[list[Room]]
) -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(ranks.device).total_memory
    gpu_bytes, host_bytes = min(ranks.exchange(gpu)), host_share(shared)
    sizes = {"dp": cfg.dp, "ring": cfg.ring, "ulysses": cfg.ulysses}
    settings = ranks.checked(
        lambda: choose_settings(
            setup.model, setup.table, sizes, cfg.seq_len, gpu_bytes, host_bytes,
            dtype=setup.dtype, compile=compiled, batch=setup.num_rows // cfg.accumulate,
            accumulate=cfg.accumulate, moments=cfg.moments,
        )
    )  # fmt: skip
    if ranks.first:
        chosen = f"chosen for {gpu_bytes / 2**30:.0f} GiB a GPU: {settings.describe()}"
        print(chosen, *settings.reasons, sep="\n  ", flush=True)
    return {**settings.options(), "moments": settings.moments}


def host_share(shared: list[list[Room]]) -> int:
    """Host memory that every rank can have, a tenth left alone; 0 where none is known."""
    names = [room.name for mine in shared for room in mine]
    shares = [room.free // names.count(room.name) for mine in shared for room in mine]
    return int(min(shares, default=0) * (1 - SPARE))
