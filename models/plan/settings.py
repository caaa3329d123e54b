"""Which options make a step fit into memory at the least cost in time, and how long a sequence can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
HEAD_CHUNKS = 4  # tried first: more cost more
GROUPS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
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

    def words(self) -> dict[str, str]:
        """By name, those that are not as without them. remat: that of the first layers, of which the last
        `stored` keep everything."""
        kinds = (self.remat,) if isinstance(self.remat, str) else tuple(dict.fromkeys(self.remat))
        found = {"remat": kinds[0]}
        if len(kinds) > 1:
            assert kinds[1:] == ("none",), "layers that keep everything come last"
            found["stored"] = str(self.remat.count("none"))
        found |= {"group": str(self.group)} if self.group > 1 else {}
        found |= {"offload": "host"} if self.offload == "host" else {}
        found |= {"mlp_tile": str(self.mlp_tile)} if self.mlp_tile else {}
        found |= {"head_chunks": str(self.head_chunks)} if self.head_chunks > 1 else {}
        return found | ({"moments": "host"} if self.moments == "host" else {})

    def describe(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.words().items())


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
    room = int(gpu_bytes * (1 - SPARE))
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
    raise DoesNotFit(seq_len, gpu_bytes, room, host_bytes, missed)


class DoesNotFit(ValueError):
    """No settings fit. `short`: of what, in words that end before the advice."""

    def __init__(
        self, seq_len: int, gpu_bytes: int, room: int, host_bytes: int, tried: Sequence[Settings]
    ) -> None:
        able = [one for one in tried if one.memory.peak.nbytes <= room]
        if able:
            best = min(able, key=lambda one: one.memory.host)
            self.short = (
                f"seq_len={seq_len} must fit host_memory={gib(host_bytes)} for each rank, got at least "
                f"{gib(best.memory.host)} ({best.describe()}, {gib(best.memory.peak.nbytes)} of the GPU's "
                f"{gib(room)})"
            )
            more = "more memory of the host, "
        else:
            best = min(tried, key=lambda one: one.memory.peak.nbytes)
            parts = sorted(best.memory.peak.parts.items(), key=lambda part: -part[1])[:3]
            largest = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in parts)
            self.short = (
                f"seq_len={seq_len} must fit gpu_memory={gib(gpu_bytes)} ({gib(room)} of it usable), got at "
                f"least {gib(best.memory.peak.nbytes)} ({best.describe()}; {largest})"
            )
            more = ""
        shorter = "" if best.memory.peak.at_rest > room else ", a shorter sequence, or smaller batches"
        super().__init__(f"{self.short}. Use {more}more ranks{shorter}.")


def candidates(
    cfg: LlamaConfig, table: Table, sizes: Mapping[str, int], seq_len: int, *, moments: str = "auto"
) -> Iterator[Settings]:
    """All settings that are tried, cheapest first.

    Nothing again; then the first layers but for their attention, from few to all of them (the last ones'
    graphs are used, and let go, first); then the MLP in tiles, the heads in chunks, the host's memory for
    what is kept, then for the moments, then more chunks and smaller tiles; then attention again too; then
    groups of layers, each run once more. `moments`: "auto", or where they live in all of them.
    """
    seen = set()
    for settings in _candidates(cfg, table, sizes, seq_len):
        one = settings if moments == "auto" else replace(settings, moments=moments)
        if one not in seen:
            seen.add(one)
            yield one


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
        yield from _finest(finer[-1], most)
    for group in (group for group in GROUPS if group < layers):
        for offload in ("none", "host"):
            last = Settings(remat="full", offload=offload, group=group)
            last = list(_finer(last, tile, chunks))[-1]
            yield last
        yield from _finest(last, most)


def _finer(settings: Settings, tile: int | None, chunks: int) -> Iterator[Settings]:
    yield settings
    if tile is not None:
        settings = replace(settings, mlp_tile=tile)
        yield settings
    if chunks > 1:
        yield replace(settings, head_chunks=chunks)


def _finest(settings: Settings, most: int) -> Iterator[Settings]:
    """What takes still less: moments on the host, up to `most` chunks of heads, half a tile."""
    settings = replace(settings, moments="host")
    yield settings
    while settings.head_chunks < most:
        settings = replace(settings, head_chunks=min(2 * settings.head_chunks, most))
        yield settings
    if settings.mlp_tile is not None:
        yield replace(settings, mlp_tile=settings.mlp_tile // 2)


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


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
