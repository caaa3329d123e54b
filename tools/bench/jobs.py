"""Which launches a call of `usp bench` asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from usp.arena import Arena
from usp.kernels import KERNELS
from usp.mesh import TABLES
from usp.models import LlamaConfig, check_layout
from usp.models.options import Options, check_how
from usp.models.plan.candidates import MLP_TILE
from usp.models.plan.settings import with_stored
from usp.tools.bench.job import PLAN, Job, Setting
from usp.tools.bench.launch import under_torchrun
from usp.tools.bench.memory import ladder
from usp.tools.bench.peers import PEERS, wanted
from usp.tools.bench.scaling import COUNTS, PART_LIMIT, Part, parts, whole_part
from usp.tools.bench.shape import shape, whole
from usp.tools.config_bench import Bench, mode
from usp.tools.plan import parse_memory
from usp.tools.setup import check_axes

FOLDER = Path("runs/bench")
K = 1024
LENGTHS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "step": (16 * K, 32 * K, 128 * K),
        "kernel": (4 * K, 16 * K, 64 * K),
        "exchange": (8 * K, 32 * K, 128 * K, 512 * K),
        "scan": (8 * K, 32 * K),
        "loss": (16 * K,),
        "passes": (4 * K, 16 * K, 64 * K),
        "memory": (128 * K, 256 * K),
        "scaling": (128 * K, 1024 * K),
        "calibrate": (32 * K,),
    }
)
ON_CPU: Mapping[str, tuple[int, ...]] = MappingProxyType({"scaling": (128, 512), "memory": (256, 512)})
ON_A_CPU = ("cpu", "tiled")  # kernels
ALONE = ("kernel", "loss", "passes")  # measured on one device
OURS: Mapping[str, Setting] = MappingProxyType(
    {
        "recompute": Setting(label="remat=attention", variant="recompute"),
        "least": Setting(label="least memory", variant="least", offload="host", mlp_tile=MLP_TILE),
        "free": Setting(label="memory free", variant="free", remat=PLAN),
    }
)
"""By what peers do at about the same memory; what takes least comes first."""


class Resources(NamedTuple):
    processes: int
    device: str  # cuda or cpu


def resources(cfg: Bench) -> Resources:
    """Processes and device kind to use. Raises ValueError for what is not there."""
    visible = torch.cuda.device_count()  # does not touch the devices
    gpus = visible if cfg.gpus is None else cfg.gpus
    if gpus and cfg.processes:
        raise ValueError(f"processes={cfg.processes} must be left out on GPUs. Or give --gpus 0.")
    if under_torchrun():
        if cfg.gpus or cfg.processes:
            raise ValueError("gpus and processes must be left out under torchrun, which says them.")
        number = int(os.environ["WORLD_SIZE"])
    else:
        if gpus > visible and not cfg.dry_run:
            raise ValueError(
                f"gpus={gpus} must be at most those that are visible, got {visible}. Lower --gpus; 0 is the "
                f"CPU."
            )
        number = gpus or cfg.processes or 2
    if mode(cfg) in ALONE and not under_torchrun():
        if max(cfg.gpus or 0, cfg.processes or 0) > 1:
            raise ValueError(f"{mode(cfg)} must be measured on one device. Leave out --gpus and --processes.")
        number = 1
    return Resources(number, "cuda" if gpus else "cpu")


def folder(cfg: Bench) -> Path:
    return FOLDER if cfg.out is None else cfg.out


def limit(cfg: Bench) -> float:
    """Seconds of one launch."""
    return cfg.limit or (PART_LIMIT if cfg.what == "scaling" else 900.0)


def lengths(cfg: Bench, device: str) -> tuple[int, ...]:
    what = mode(cfg)
    return cfg.seq_len or (LENGTHS[what] if device == "cuda" else ON_CPU.get(what, (256,)))


def peers(cfg: Bench, where: Resources) -> dict[str, str]:
    """Each peer that is asked for, and why it cannot run here ("": it can)."""
    names = wanted(cfg.peers, mode(cfg), where.processes) if mode(cfg) in ("step", "exchange") else []
    windows = mode(cfg) == "step" and bool(model_of(cfg, where).windows)
    return {name: PEERS[name].obstacle(where.processes, where.device, windows=windows) for name in names}


def model_name(cfg: Bench, where: Resources) -> str:
    return cfg.model or ("llama-3-8b" if where.device == "cuda" else "tiny")


def model_of(cfg: Bench, where: Resources) -> LlamaConfig:
    return shape(model_name(cfg, where), cfg.layers, cfg.window)


def check_setting(setting: Setting, model: LlamaConfig, processes: int, kernel: str) -> None:
    """ValueError for what does not go together, or with the model."""
    if processes % setting.ring:
        raise ValueError(
            f"ring={setting.ring} must divide the processes, got {processes}. Change it in {setting.label!r}."
        )
    sizes = {"dp": 1, "ring": setting.ring, "ulysses": processes // setting.ring}
    check_axes(setting.table, ring=sizes["ring"], ulysses=sizes["ulysses"])
    table = TABLES[setting.table]
    check_layout(model, mesh=sizes, table=table)
    remat = with_stored(setting.remat, setting.stored, model.num_layers)
    options: Options = {"remat": "attention" if setting.remat == PLAN else remat}
    options |= {"group": setting.group, "offload": setting.offload, "mlp_tile": setting.mlp_tile}
    options |= {"head_chunks": setting.head_chunks, "kernel": kernel}
    if setting.offload == "host":
        options["arena"] = Arena()
    check_how(model, table=table, mesh=sizes, options=options)


def check_kernel(name: str, device: str) -> None:
    """ValueError for a name that is no kernel's, or of one that a CPU has not."""
    known = ("auto", *(k for k in KERNELS if device == "cuda" or k in ON_A_CPU), "reference")
    if name not in known:
        where = "" if device == "cuda" else " on a CPU"
        raise ValueError(f"kernel={name} must be one of {', '.join(known)}{where}. Change --kernel.")


def jobs(cfg: Bench, where: Resources) -> list[Job]:
    """Ours first, then every peer's. Raises ValueError for a model, setting or length that does not do."""
    model, what = model_of(cfg, where), mode(cfg)
    check_kernel(cfg.kernel, where.device)
    seq_lens = lengths(cfg, where.device)
    common: dict[str, Any] = {
        "what": what, "model": model_name(cfg, where), "layers": model.num_layers, "window": cfg.window,
        "device": where.device,
        "kernel": cfg.kernel, "steps": cfg.steps, "limit": limit(cfg), "batch_sizes": cfg.batch_size,
        "trace": None if cfg.trace is None else str(cfg.trace.absolute()),
        "host_memory": parse_memory("host-memory", cfg.host_memory) if cfg.host_memory else None,
        "logs": None if mode(cfg) == "calibrate" else str(folder(cfg).absolute()),
    }  # fmt: skip
    if what == "scaling":
        return [
            Job(**common | p.asked(), contender="usp") for p in chosen(cfg, where) if p.seconds <= limit(cfg)
        ]
    common |= {"processes": where.processes, "seq_lens": seq_lens}
    settings = tuple(Setting.parse(text) for text in cfg.setting)
    for setting in settings:
        check_setting(setting, model, where.processes, cfg.kernel)
    if what == "memory":
        settings = settings or ladder(model, max(seq_lens), where.processes)
    if what == "step":
        settings = (*(one for name, one in OURS.items() if name in cfg.variants), *settings)
    variants = cfg.variants if what == "step" else ()
    able = [name for name, obstacle in peers(cfg, where).items() if not obstacle]
    ours = Job(contender="usp", settings=settings, **common)
    return [ours, *(Job(contender=name, variants=variants, **common) for name in able)]


def all_parts(cfg: Bench, where: Resources) -> list[Part]:
    """Of the scaling runs, on as many GPUs as there are to use."""
    counts = [where.processes] if under_torchrun() else [n for n in COUNTS if n <= where.processes]
    model, both = model_of(cfg, where), lengths(cfg, where.device)
    every = whole(model_name(cfg, where))
    found = parts(model, counts, both, cfg.steps, where.device)
    if every.num_layers > model.num_layers:
        found += [whole_part(every, n, both[0], where.device) for n in counts]
    return found


def chosen(cfg: Bench, where: Resources) -> list[Part]:
    """The part that is asked for, or all. Raises ValueError for a number that is none's."""
    found = all_parts(cfg, where)
    if cfg.part is None:
        return found
    if not 0 <= cfg.part < len(found):
        raise ValueError(f"part={cfg.part} must be from 0 to {len(found) - 1}. See --dry-run.")
    return [found[cfg.part]]
