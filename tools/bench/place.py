"""Where a process of a measurement runs, and where its rows go."""

from __future__ import annotations

import importlib
import json
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from usp.host import available_bytes
from usp.kernels import WINDOW, choose
from usp.models import LlamaConfig
from usp.tools.bench.job import Row
from usp.tools.flops import device_name

PACKAGES = (
    "torch", "triton", "flash-attn-4", "transformers", "deepspeed", "liger-kernel", "yunchang",
    "nvidia-cudnn-cu13",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """This process among those of its launch; `rows` is the file that rank 0 adds lines of JSON to."""

    rank: int
    world: int
    local_world: int
    device: torch.device
    rows: Path

    @property
    def dtype(self) -> torch.dtype:
        """What models compute in."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def memory(self) -> int:
        """Bytes of this device, or of the host for each process on it."""
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        return self.host_memory()

    def host_memory(self) -> int:
        """Bytes of the host that this process may count on."""
        return (available_bytes() or 0) // self.local_world

    def emit(self, row: Row) -> None:
        if self.rank == 0:
            with self.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def machine(self) -> Row:
        """What the numbers were measured on."""
        versions: dict[str, str] = {"python": platform.python_version()}
        for package in PACKAGES:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        found: Row = {"device": device_name(self.device), "processes": self.world, "versions": versions}
        found |= {
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "host_memory": self.host_memory(),
        }
        if self.device.type == "cuda":
            found |= {"gpu_memory": self.memory(), "cuda": torch.version.cuda}
            nccl: Any = importlib.import_module("torch.cuda.nccl")
            cudnn: Any = torch.backends.cudnn
            found |= {"cudnn": cudnn.version(), "nccl": ".".join(map(str, nccl.version()))}
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        found["environment"] = {
            name: value for name, value in os.environ.items() if name in names or name.startswith("NCCL_")
        }
        return found


def kernel_name(name: str, cfg: LlamaConfig, place: Place) -> str:
    """The kernel that is meant, one for all layers and lengths, so that it takes windows where a layer has
    one; "auto" is never left open. Raises ValueError for none."""
    size, dtype, wanted = cfg.head_dim, place.dtype, (WINDOW,) if cfg.windows else ()
    return choose(name, device=place.device, dtype=dtype, size=size, v_size=size, features=wanted).name


def join(rows: Path, device: str, *, seconds: float) -> Place:
    """Join the other processes, with NCCL between GPUs and gloo between CPUs; alone, no group is made."""
    from datetime import timedelta

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    own = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(own)
    if world > 1:
        limit = timedelta(seconds=seconds)
        if device == "cuda":
            dist.init_process_group("nccl", device_id=own, timeout=limit)
        else:
            dist.init_process_group("gloo", timeout=limit)
    return Place(rank, world, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), own, rows)
