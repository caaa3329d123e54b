"""Settings of a step in the order of what they cost in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from usp.mesh import Table
from usp.models.config import LlamaConfig
from usp.models.plan.local import local
from usp.models.plan.settings import Settings

MLP_TILE = 8192  # tokens: large enough to keep a GPU busy
HEAD_CHUNKS = 4  # tried first: more cost more
GROUPS = (2, 3, 4, 6, 8, 12, 16, 24, 32)


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
