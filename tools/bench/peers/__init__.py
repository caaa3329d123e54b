"""Other projects that are measured beside ours, and what it takes to run them. Imports none of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Peer(NamedTuple):
    """`package`: what must be importable. `install`: the command that brings it, and what it is best with."""

    title: str
    package: str
    install: str
    what: tuple[str, ...]
    no_cpu: str = ""  # why it does not run on a CPU
    no_windows: str = ""  # why it does not run a model with sliding windows
    least: int = 1  # processes
    most: int | None = None

    def obstacle(self, processes: int, device: str, *, windows: bool) -> str:
        """Why it cannot be measured here, or "". `windows`: whether a layer has a sliding window."""
        if importlib.util.find_spec(self.package) is None:
            return f"not installed: {self.install}"
        if device == "cpu" and self.no_cpu:
            return self.no_cpu
        if windows and self.no_windows:
            return self.no_windows
        return "" if self.takes(processes) else f"runs on other numbers of processes than {processes}"

    def takes(self, processes: int) -> bool:
        return processes >= self.least and (self.most is None or processes <= self.most)


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "deepspeed": Peer(
            "DeepSpeed ALST",
            "deepspeed",
            "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8 liger-kernel==0.8.5",
            ("step", "exchange"),
        ),
        "torch-cp": Peer(
            "torch context_parallel + FSDP2",
            "torch.distributed.tensor.experimental",
            "pip install 'torch>=2.11' liger-kernel==0.8.5",
            ("step",),
            least=2,
            no_cpu="torch context_parallel replaces attention on GPUs only (flash and cuDNN)",
            no_windows="torch context_parallel has no sliding window",
        ),
        "transformers": Peer(
            "Transformers",
            "transformers",
            "pip install 'transformers>=5.24' liger-kernel==0.8.5",
            ("step",),
            most=1,
        ),
        "yunchang": Peer("yunchang", "yunchang", "pip install yunchang==0.6.4", ("exchange",), least=2),
    }
)


def wanted(names: tuple[str, ...], what: str, processes: int) -> list[str]:
    """The peers that `--peers` names for this measurement. Raises ValueError for a name that is none's."""
    known = [name for name, peer in PEERS.items() if what in peer.what]
    if names == ("none",):
        return []
    if names == ("auto",):
        return [name for name in known if PEERS[name].takes(processes)]
    for name in names:
        if name in ("none", "auto"):
            raise ValueError(f"peers={' '.join(names)} must hold {name} alone. Change --peers.")
        if name not in known:
            raise ValueError(f"peers={name} must be auto, none or of {', '.join(known)}. Change --peers.")
    return list(names)
