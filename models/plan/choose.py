"""Which options make a step fit into memory at the least cost in time, and how long a sequence can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

import torch

from usp.mesh import Table
from usp.models.config import LlamaConfig
from usp.models.plan.candidates import candidates
from usp.models.plan.memory import training_memory
from usp.models.plan.memory_parts import Memory
from usp.models.plan.settings import Settings, gib
from usp.order import unit

SPARE = 0.08  # of the device's memory: its context, the libraries' work space, gaps between tensors


class Given(TypedDict, total=False):
    """What is not searched for."""

    dtype: torch.dtype
    compile: bool
    batch: int
    accumulate: int
    moments: str
    """Where AdamW's moments live: "device", "host", or "auto"."""


def choose_settings(
    cfg: LlamaConfig,
    table: Table,
    sizes: Mapping[str, int],
    seq_len: int,
    gpu_bytes: int,
    host_bytes: int,
    **given: Unpack[Given],
) -> Settings:
    """The first settings, in order of what they cost in time, whose step fits a rank's memory.

    `gpu_bytes` of one device, of which `SPARE` is left alone; `host_bytes` of the host for one rank. `batch`
    (default: as many rows as the table cuts) rows of `seq_len` tokens. Raises ValueError when none fits,
    naming what is short: the host where some would fit the device, else what takes the device's memory.
    """
    room = usable(gpu_bytes)
    tried: list[str] = []
    missed: list[Settings] = []
    for settings in candidates(cfg, table, sizes, seq_len, moments=given.get("moments", "auto")):
        memory = _memory(cfg, table, sizes, seq_len, settings, given)
        need = memory.peak.nbytes
        if need > room:
            tried.append(f"{settings.describe()} takes {gib(need)}: {memory.peak.name}")
        elif memory.host > host_bytes:
            tried.append(f"{settings.describe()} takes {gib(memory.host)} of {gib(host_bytes)} host memory")
        else:
            reasons = (*tried, f"{settings.describe()} takes {gib(need)} of {gib(room)}")
            return replace(settings, reasons=reasons, memory=memory)
        missed.append(replace(settings, memory=memory))
    raise _does_not_fit(missed, seq_len, gpu_bytes, host_bytes)


class DoesNotFit(ValueError):
    """No settings fit. `short`: of what."""

    def __init__(self, short: str, advice: str) -> None:
        super().__init__(f"{short}. {advice}")
        self.short = short


def usable(gpu_bytes: int) -> int:
    """Of a device's memory, what a step may take."""
    return int(gpu_bytes * (1 - SPARE))


def _does_not_fit(missed: Sequence[Settings], seq_len: int, gpu_bytes: int, host_bytes: int) -> DoesNotFit:
    """`missed`: all that were tried, with the memory that they take."""
    room, more = usable(gpu_bytes), ""
    able = [one for one in missed if one.memory.peak.nbytes <= room]
    best = min(able or missed, key=lambda one: one.memory.host if able else one.memory.peak.nbytes)
    need = gib(best.memory.peak.nbytes)
    if able:
        more = "more memory of the host, "
        short = (
            f"seq_len={seq_len} must fit host_memory={gib(host_bytes)} for each rank, got at least "
            f"{gib(best.memory.host)} ({best.describe()}, {need} of the GPU's {gib(room)})"
        )
    else:
        parts = sorted(best.memory.peak.parts.items(), key=lambda part: -part[1])[:3]
        largest = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in parts)
        short = (
            f"seq_len={seq_len} must fit gpu_memory={gib(gpu_bytes)} ({gib(room)} of it usable), got at "
            f"least {need} ({best.describe()}; {largest})"
        )
    shorter = "" if best.memory.peak.at_rest > room else ", a shorter sequence, or smaller batches"
    return DoesNotFit(short, f"Use {more}more ranks{shorter}.")


def longest(
    cfg: LlamaConfig,
    table: Table,
    sizes: Mapping[str, int],
    gpu_bytes: int,
    host_bytes: int,
    **given: Unpack[Given],
) -> tuple[int, Settings]:
    """The longest sequence for which `choose_settings` finds some, and those settings: to 1 %, then rounded
    down to a multiple of 1024 tokens a rank where it has as many. ValueError when not even the shortest fits.
    """
    ranks = 1
    for axis in table.tokens[1]:
        ranks *= sizes[axis]
    step = 2 * ranks * unit(1)

    def found(steps: int) -> Settings | None:
        try:
            return choose_settings(cfg, table, sizes, steps * step, gpu_bytes, host_bytes, **given)
        except ValueError:
            return None

    try:
        choose_settings(cfg, table, sizes, step, gpu_bytes, host_bytes, **given)
    except DoesNotFit as error:
        raise ValueError(
            f"no length fits: {error.short}. Use more ranks, or ranks with more memory."
        ) from None
    low, high = 1, 2
    while found(high) is not None:
        low, high = high, 2 * high
    while high - low > max(low // 200, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if found(middle) is not None else (low, middle)
    low = low // 512 * 512 or low
    settings = found(low)
    assert settings is not None
    return low * step, settings


def _memory(
    cfg: LlamaConfig,
    table: Table,
    sizes: Mapping[str, int],
    seq_len: int,
    settings: Settings,
    given: Given,
) -> Memory:
    rows = 1
    for axis in table.tokens[0]:
        rows *= sizes[axis]
    return training_memory(
        cfg, table, sizes,
        batch=given.get("batch", rows),
        seq_len=seq_len,
        accumulate=given.get("accumulate", 1),
        dtype=given.get("dtype", torch.bfloat16),
        compile=given.get("compile", False),
        moments=settings.moments,
        **settings.options(),
    )  # fmt: skip
