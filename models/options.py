"""How the layers run: the options of `usp.models.loss` and its like, and every rule about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch

from usp.arena import Arena
from usp.data import Shard
from usp.head_chunks import deal_chunks
from usp.heads import trading_axis
from usp.kernels import KERNELS
from usp.mesh import Table, axis_sizes
from usp.models.config import LlamaConfig
from usp.models.layout import check_layout
from usp.models.own_heads import ways
from usp.models.params import Mesh, Params
from usp.scan.api import check_settings


class Options(TypedDict, total=False):
    """How the layers run; what each means is said at `usp.scan` and `usp.models.loss`."""

    remat: str | Sequence[str]
    group: int
    offload: str
    arena: Arena | None
    compile: bool
    dtype: torch.dtype | None
    mlp_tile: int | None
    kernel: str
    head_chunks: int


def check_options(
    params: Params, shard: Shard, cfg: LlamaConfig, *, table: Table, mesh: Mesh, options: Options
) -> None:
    """ValueError, on every rank alike and before any communication, for what does not exist or fit."""
    check_layout(cfg, mesh=mesh, table=table, seq_len=shard.seq_len)
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        known = ", ".join(Options.__annotations__)
        raise ValueError(f"option {unknown[0]!r} must be one of {known}. Correct its name.")
    if len(params.layers) != cfg.num_layers:
        raise ValueError(
            f"num_layers={cfg.num_layers} must be that of the parameters, got {len(params.layers)} layers. "
            f"Pass the configuration that they were made with."
        )
    if torch.is_autocast_enabled(shard.tokens.device.type):
        raise ValueError("autocast must be off, got it on. Pass dtype=torch.bfloat16 to compute in it.")
    remat = options.get("remat", "none")
    check_settings(
        remat, options.get("group", 1), options.get("offload", "none"), options.get("arena"), cfg.num_layers
    )
    tile, kernel = options.get("mlp_tile"), options.get("kernel", "auto")
    if tile is not None and (not _whole(tile) or tile < 1):
        raise ValueError(f"mlp_tile={tile} must be a whole number of at least 1. Leave it out for no tiles.")
    if kernel not in (*KERNELS, "auto", "reference"):
        raise ValueError(
            f"kernel={kernel!r} must be one of auto, {', '.join(KERNELS)}, reference. Choose one."
        )
    _check_chunks(options.get("head_chunks", 1), cfg, table, mesh)
    if kernel == "reference" and (options.get("head_chunks", 1) != 1 or "attention" in remat):
        raise ValueError(
            f"kernel='reference' must come without head_chunks and remat='attention', as it keeps nothing, "
            f"got head_chunks={options.get('head_chunks', 1)}, remat={remat!r}. Use kernel='tiled'."
        )


def _check_chunks(head_chunks: Any, cfg: LlamaConfig, table: Table, mesh: Mesh) -> None:
    if not _whole(head_chunks):
        raise ValueError(f"head_chunks={head_chunks!r} must be a whole number. Use 1 for all heads at once.")
    if head_chunks == 1:
        return
    axis, sizes = trading_axis(table, mesh), axis_sizes(mesh)
    deal_chunks(cfg.num_heads, cfg.num_kv_heads, 1 if axis is None else sizes[axis], head_chunks)
    if ways(table, sizes) > 1:
        raise ValueError(
            f"head_chunks={head_chunks} must be 1 where attention's weights stay cut by head, got "
            f"use['wq']={table.use['wq']} in table={table.name!r}. Choose a table that trades heads."
        )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
