"""Which options make a step fit into memory at the least cost in time, and how long a sequence can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import torch

from usp.mesh import Table
from usp.models.config import LlamaConfig
from usp.models.plan.local import local
from usp.models.plan.memory import training_memory
from usp.models.plan.memory_parts import Memory
from usp.order import unit

MLP_TILE = 8192  # tokens: large enough to keep a GPU busy
HEAD_CHUNKS = 4
NOTHING = Memory((), 0)
SPARE = 0.08  # of the device's memory: its context, the libraries' work space, gaps between tensors


class Given(TypedDict, total=False):
    """What is not searched for."""

    dtype: torch.dtype
    compile: bool
    batch: int
    accumulate: int
    moments: str
    """Where AdamW's moments live: "device", "host", or "auto"."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of a step that fits, why they are these, and what the step then takes."""

    remat: str | tuple[str, ...] = "none"
    group: int = 1
    offload: str = "none"
    mlp_tile: int | None = None
    head_chunks: int = 1
    moments: str = "device"
    reasons: tuple[str, ...] = ()
    memory: Memory = NOTHING

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `usp.models.loss`; offload="host" also wants an `arena`. `moments` is not one
        of them: `usp.adamw_init` takes an arena for "host"."""
        names = ("remat", "group", "offload", "mlp_tile", "head_chunks")
        return {name: getattr(self, name) for name in names}

    def describe(self) -> str:
        kinds = [self.remat] if isinstance(self.remat, str) else list(dict.fromkeys(self.remat))
        words = [f"remat={kinds[0]}"]
        if len(kinds) > 1:
            words = [f"remat={' '.join(f'{kind} x{self.remat.count(kind)}' for kind in kinds)}"]
        words += [f"group={self.group}"] if self.group > 1 else []
        words += ["offload=host"] if self.offload == "host" else []
        words += [f"mlp_tile={self.mlp_tile}"] if self.mlp_tile else []
        words += [f"head_chunks={self.head_chunks}"] if self.head_chunks > 1 else []
        words += ["moments=host"] if self.moments == "host" else []
        return ", ".join(words)


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
    naming what takes the memory.
    """
    room = int(gpu_bytes * (1 - SPARE))
    tried: list[str] = []
    best: Settings | None = None
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
        if best is None or need < best.memory.peak.nbytes:
            best = replace(settings, memory=memory)
    assert best is not None
    parts = sorted(best.memory.peak.parts.items(), key=lambda part: -part[1])[:3]
    largest = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in parts)
    raise ValueError(
        f"seq_len={seq_len} must fit gpu_memory={gib(gpu_bytes)} ({gib(room)} of it usable), got at least "
        f"{gib(best.memory.peak.nbytes)} ({largest}) and host memory {gib(host_bytes)}. Use more ranks, a "
        f"shorter sequence, or smaller batches."
    )


def candidates(
    cfg: LlamaConfig, table: Table, sizes: Mapping[str, int], seq_len: int, *, moments: str = "auto"
) -> Iterator[Settings]:
    """All settings that are tried, cheapest first.

    Nothing again; then the first layers but for their attention, from few to all of them (the last ones'
    graphs are used, and let go, first); then the MLP in tiles, the heads in chunks, the host's memory for
    what is kept, then for the moments; then attention again too; then groups of layers, each run once more.
    `moments`: "auto", or where they live in all of them.
    """
    for settings in _candidates(cfg, table, sizes, seq_len):
        if moments == "auto":
            yield settings
        elif settings.moments == "device":
            yield replace(settings, moments=moments)


def _candidates(cfg: LlamaConfig, table: Table, sizes: Mapping[str, int], seq_len: int) -> Iterator[Settings]:
    layers = cfg.num_layers
    yield Settings()
    for eighths in range(1, 8):
        again = -(-layers * eighths // 8)
        if again < layers and again > layers * (eighths - 1) // 8:
            yield Settings(remat=("attention",) * again + ("none",) * (layers - again))
    where = local(cfg, table, sizes, batch=1, seq_len=seq_len)
    most = 1 if where.ways > 1 else max(deal.q_stop - deal.q_start for deal in where.deals)
    chunks = min(HEAD_CHUNKS, most)
    tile = MLP_TILE if where.tokens(table.mlp_x) > MLP_TILE else None
    for remat in ("attention", "full"):
        for offload in ("none", "host"):
            finer = list(_finer(Settings(remat=remat, offload=offload), tile, chunks))
            yield from finer
        yield replace(finer[-1], moments="host")
    for group in (2, 4, 8, 16, 32):
        if group < layers:
            for offload in ("none", "host"):
                last = Settings(remat="full", offload=offload, group=group)
                last = list(_finer(last, tile, chunks))[-1]
                yield last
            yield replace(last, moments="host")


def _finer(settings: Settings, tile: int | None, chunks: int) -> Iterator[Settings]:
    yield settings
    if tile is not None:
        settings = replace(settings, mlp_tile=tile)
        yield settings
    if chunks > 1:
        yield replace(settings, head_chunks=chunks)


def longest(
    cfg: LlamaConfig,
    table: Table,
    sizes: Mapping[str, int],
    gpu_bytes: int,
    host_bytes: int,
    **given: Unpack[Given],
) -> tuple[int, Settings]:
    """The longest sequence for which `choose_settings` finds some, to 1 %, and those settings.

    A multiple of 1024 tokens a rank where it is long enough. ValueError when not even the shortest fits.
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
    except ValueError as error:
        raise ValueError(f"no length fits: {error}") from None
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


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
