"""The memory ladder: what each way of saving memory leaves, what it costs, and how long a row then can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from usp import models
from usp.mesh import TABLES
from usp.models import LlamaConfig
from usp.models.plan.candidates import HEAD_CHUNKS, MLP_TILE
from usp.models.plan.choose import usable
from usp.models.plan.settings import OPTIONS
from usp.tools.bench.job import GIB, Row, Setting
from usp.tools.bench.shape import shape

WORLDS, LAYERS = (1, 2, 8), 32  # for which the longest row is worked out
GROUP = 4


def ladder(cfg: LlamaConfig, seq_len: int, processes: int) -> tuple[Setting, ...]:
    """From everything kept to as little as possible, one step at a time where steps build on each other."""
    tile = min(MLP_TILE, max(1, seq_len // processes // 2))
    chunks = chunks_of(cfg, processes, HEAD_CHUNKS)
    group = min(GROUP, cfg.num_layers)
    kept = Setting(label="+ attention kept", remat="attention", mlp_tile=tile)
    offloaded = replace(kept, label="+ offload", offload="host")
    full = replace(offloaded, label="+ groups", remat="full", group=group)
    return (
        Setting(label="none", remat="none"),
        Setting(label="+ tiles", remat="none", mlp_tile=tile),
        Setting(label="+ full remat", remat="full", mlp_tile=tile),
        kept,
        offloaded,
        replace(offloaded, label="+ head chunks", head_chunks=chunks),
        full,
        replace(full, label="+ groups, head chunks", head_chunks=chunks),
    )


def options(row: Row) -> dict[str, Any]:
    """The model's options that a row was measured with."""
    names = (*OPTIONS, "moments", "compile")
    given = {"moments": "device", **row}
    return {**{name: given[name] for name in names}, "dtype": getattr(torch, row["dtype"])}


def slopes(rows: Sequence[Row], gpu_memory: int | None) -> list[Row]:
    """Per rung that was measured at two lengths or more: growth per local token, and the longest rows.

    The growth is that between the two longest lengths. For `LAYERS` layers and other numbers of GPUs, what is
    above parameters and moments is taken to be as many times what is foretold as in the longest row.
    """
    found = []
    for label in dict.fromkeys(row["label"] for row in rows):
        own = {row["seq_len"]: row for row in rows if row["label"] == label and row.get("peak")}
        if len(own) < 2 or not gpu_memory:
            continue
        short, long = (own[n] for n in sorted(own)[-2:])
        between = (long["seq_len"] - short["seq_len"]) / long["world"]
        growth = (long["peak"] - short["peak"]) / between
        given = options(long)
        said = (long["foretold"] - short["foretold"]) / between
        scheme = long["table"], long["ring"]
        row = {"label": label, "growth": growth, "foretold_growth": said, "layers": long["layers"]}
        big = shape(long["model"], LAYERS)
        times = (long["peak"] - long["base"]) / (long["foretold"] - long["foretold_base"])
        worlds = (n for n in WORLDS if n % scheme[1] == 0)
        row["longest"] = {n: longest(big, n, scheme, given, times, gpu_memory) for n in worlds}
        found.append(row)
    return found


Scheme = tuple[str, int]
"""A table's name, and the degree of the ring."""


def foretold(
    cfg: LlamaConfig, world: int, local: int, scheme: Scheme, given: Mapping[str, Any]
) -> models.Memory:
    """What the plan says of `local` tokens on each of `world` GPUs."""
    table, ring = scheme
    sizes = {"dp": 1, "ring": ring, "ulysses": world // ring}
    given = {**given, "head_chunks": chunks_of(cfg, sizes["ulysses"], given["head_chunks"])}
    return models.training_memory(cfg, TABLES[table], sizes, batch=1, seq_len=local * world, **given)


def chunks_of(cfg: LlamaConfig, ulysses: int, num_chunks: int) -> int:
    """So many chunks of heads, or one for each head of a rank where it has fewer."""
    return min(num_chunks, -(-cfg.num_heads // ulysses))


def longest(
    cfg: LlamaConfig, world: int, scheme: Scheme, given: Mapping[str, Any], times: float, gpu_memory: int
) -> Row:
    """Tokens over all GPUs that fit when all but parameters and moments takes `times` what is foretold, and
    the host's GiB for each GPU then; 0 where not even 1024 tokens fit. With how many chunks of heads."""

    def fits(blocks: int) -> bool:
        try:
            peak = foretold(cfg, world, blocks * 1024, scheme, given).peak
        except ValueError:  # more tokens than a batch can have
            return False
        return peak.at_rest + times * (peak.nbytes - peak.at_rest) <= usable(gpu_memory)

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    host = foretold(cfg, world, low * 1024, scheme, given).host if low else 0
    chunks = chunks_of(cfg, world // scheme[1], given["head_chunks"])
    return {"tokens": low * 1024 * world, "host_gib": host / GIB, "head_chunks": chunks}


def slope_lines(found: Sequence[Row]) -> Iterator[str]:
    for row in found:
        chunks = max(one["head_chunks"] for one in row["longest"].values())
        ends = ", ".join(
            f"{world} GPU{'s' if world > 1 else ''} {one['tokens'] / 1024:.0f}K"
            + (f" (host {one['host_gib']:.0f} GiB each)" if one["host_gib"] else "")
            + (f" in {one['head_chunks']} head chunks" if one["head_chunks"] < chunks else "")
            for world, one in row["longest"].items()
        )
        yield (
            f"  {row['label']:<22} {row['growth'] / 1024:7.1f} KiB a local token "
            f"(foretold {row['foretold_growth'] / 1024:.1f}) with {row['layers']} layers; "
            f"longest with {LAYERS}: {ends}"
        )
