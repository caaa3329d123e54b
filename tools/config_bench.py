"""What a user can set for `usp bench`, and which options belong to which measurement."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from usp.tools.lengths import Tokens

What = Literal["step", "kernel", "exchange", "scan", "loss", "passes", "memory", "scaling"]
Variant = Literal["recompute", "free", "least"]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure this project and its peers on random weights: a table, JSON and a plot.

    Starts its own processes, one launch for each contender. Under torchrun it uses those processes instead,
    one for each GPU of all machines.
    """

    what: What = "step"
    """step: whole training steps, ours and the peers'. kernel: attention kernels. exchange: q, k, v to the
    heads and back. scan: the layer scan against a plain loop. loss: the fused loss against torch's and its
    floor. passes: norm, rotation, activation, loss and optimizer against a copy of their bytes. memory: what
    each way of saving memory takes and costs. scaling: 1, 2, 4, 8 GPUs."""
    calibrate: bool = False
    """Measure this machine's rates instead, for the times that `usp plan` prints."""
    plot: tuple[Path, ...] = ()
    """Measure nothing: table and plot again from these JSON files of --what, all together."""

    model: str | None = None
    """Shape by name (as for `usp plan`, or tiny), or a Hugging Face model directory. Default: llama-3-8b, on
    the CPU tiny."""
    layers: int | None = None
    """Layers that are built; sliding windows of layers follow in the model's order, which starts again where
    it ends. Default: the model's, 8 at most. For step, scan, memory and scaling."""
    window: Tokens | None = None
    """Every layer sees so many tokens back: what it remembers stays as it is, and the steps of a long row
    become short enough to measure its memory. For memory."""
    seq_len: tuple[Tokens, ...] = ()
    """Tokens in one row over all ranks, one or more lengths, such as 131072, 128K or 2M. For scaling two
    numbers: tokens per GPU, and tokens in all. Default: what suits the measurement."""
    batch_size: tuple[int, ...] = (1,)
    """Rows exchanged at once, one or more numbers. For exchange."""
    gpus: int | None = None
    """GPUs to use. Default: all visible ones. 0: the CPU."""
    processes: int | None = None
    """Processes on the CPU. Default: 2."""

    peers: tuple[str, ...] = ("auto",)
    """deepspeed, torch-cp, transformers (one process), yunchang (exchange). auto: all that apply; those that
    are not installed are named. none: only ours. For step and exchange."""
    variants: tuple[Variant, ...] = ("recompute", "free")
    """recompute: at the memory of full recomputation (ours keeps attention's result). free: with memory to
    spare, as little as fits is computed again. least: attention's result is kept, what is kept waits on the
    host, the MLP goes in tiles (ours and deepspeed); more by --setting. For step."""
    setting: tuple[str, ...] = ()
    """Our own rows with other options, each as name=value,name=value: remat, group, offload, mlp_tile,
    head_chunks, moments (device, host), table, ring, stored (so many of the last layers keep everything),
    compile (True, False). remat is attention unless given. For step, and for memory in place of its rungs."""
    kernel: str = "auto"
    """Attention kernel: flash4, cudnn, flash, cpu, tiled, reference. auto: the best that each contender can
    use; a name: a contender that cannot use it says so. For step, scan, memory and scaling."""
    steps: int = 5
    """Timed steps at most; long ones are repeated less often. For step, scan, memory and scaling."""
    host_memory: str | None = None
    """Memory of the host that each process may take for what it offloads, for example 100GB, where options
    are chosen by what fits. Default: what is available when it starts. For step and scaling."""
    limit: float | None = None
    """Seconds that one launch may take. Default: 900; for a part of the scaling 580."""
    trace: Path | None = None
    """Folder for a Chrome trace of one step of each of our rows, beside it what every stream of the GPU ran
    and how long it waited, as text and drawn. For step."""

    part: int | None = None
    """Only this part of the scaling runs, counted from 0. Each is planned for less than 10 minutes; one
    that is foretold to take longer is left out, unless --limit is larger."""
    dry_run: bool = False
    """Print the commands of the parts of the scaling, and run nothing."""
    out: Path | None = None
    """Folder that gets WHAT.json and WHAT.png; a run is added to what is there. Default: runs/bench. With
    --calibrate: the file for the rates. Default: usp/rates.json in $XDG_CACHE_HOME or ~/.cache."""


_SHARED = frozenset({"what", "model", "gpus", "processes", "limit", "out"})
_STEPS = _SHARED | {"layers", "seq_len", "kernel", "steps"}
USED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "step": _STEPS | {"peers", "variants", "setting", "trace", "host_memory"},
        "kernel": _SHARED | {"seq_len"},
        "exchange": _SHARED | {"seq_len", "batch_size", "peers"},
        "scan": _STEPS,
        "loss": _SHARED | {"seq_len"},
        "passes": _SHARED | {"seq_len"},
        "memory": _STEPS | {"setting", "window"},
        "scaling": _STEPS | {"part", "dry_run", "host_memory"},
        "calibrate": _SHARED - {"what"} | {"calibrate"},
        "plot": frozenset({"what", "plot", "out"}),
    }
)
"""Options that each measurement reads."""


def mode(cfg: Bench) -> str:
    """What is to be done: a name in USED."""
    return "plot" if cfg.plot else "calibrate" if cfg.calibrate else cfg.what


def check(cfg: Bench) -> None:
    """The rules that need nothing but the options. Raises ValueError."""
    used = USED[mode(cfg)]
    for field in fields(Bench):
        assert field.default is not MISSING
        value = getattr(cfg, field.name)
        if value != field.default and field.name not in used:
            those = ", ".join(what for what, names in USED.items() if field.name in names)
            raise ValueError(
                f"{field.name}={value} must be left out where it has no effect, got {mode(cfg)}; it is for "
                f"{those}. Leave out --{field.name.replace('_', '-')}."
            )
    for name in ("layers", "window", "processes", "steps", "limit"):
        value = getattr(cfg, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1. Change --{name}.")
    for name in ("seq_len", "batch_size"):
        if any(n < 1 for n in getattr(cfg, name)):
            flag = name.replace("_", "-")
            raise ValueError(f"{name}={getattr(cfg, name)} must be at least 1 each. Change --{flag}.")
    if cfg.gpus is not None and cfg.gpus < 0:
        raise ValueError(f"gpus={cfg.gpus} must be 0 or more. Change --gpus.")
    if cfg.dry_run and cfg.part is not None:
        raise ValueError(
            f"part={cfg.part} must be left out with dry_run, which names all parts. Leave out --part."
        )
    if cfg.what == "scaling" and len(cfg.seq_len) not in (0, 2):
        raise ValueError(
            f"seq_len={cfg.seq_len} must be two numbers for scaling. Give tokens per GPU and tokens in all."
        )
