"""How the layers run: the options of `usp.models.loss` and its like, and every rule about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch

from usp.arena import Arena
from usp.data import Shard
from usp.head_chunks import deal_chunks
from usp.heads import trading_axis
from usp.kernels import KERNELS, PACKED, WINDOW, choose
from usp.mesh import Table, axis_sizes, local_shape
from usp.models.config import LlamaConfig
from usp.models.layout import check_layout
from usp.models.own_heads import ways
from usp.models.params import Block, Leaf, Mesh, Params, abstract, spec_of
from usp.scan.api import check_settings

_IDS = (torch.int64,)
_WHOLE = (torch.int64, torch.int32)


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
    """ValueError, on every rank alike and before any communication, for what does not exist or fit.

    Reads no value of a tensor, so that nothing waits for a GPU: ids were looked at when the batch was cut.
    """
    check_layout(cfg, mesh=mesh, table=table, seq_len=shard.seq_len)
    if len(params.layers) != cfg.num_layers:
        raise ValueError(
            f"num_layers={cfg.num_layers} must be that of the parameters, got {len(params.layers)} layers. "
            f"Pass the configuration that they were made with."
        )
    _check_params(params, cfg, table, mesh, cast=options.get("dtype") is not None)
    _check_shard(params, shard, cfg)
    if torch.is_autocast_enabled(shard.tokens.device.type):
        raise ValueError("autocast must be off, got it on. Pass dtype=torch.bfloat16 to compute in it.")
    check_how(cfg, table=table, mesh=mesh, options=options)
    check_kernel(
        options.get("kernel", "auto"), cfg, device=shard.tokens.device,
        dtype=options.get("dtype") or params.embed.dtype, seq_len=shard.seq_len, packed=shard.packed,
    )  # fmt: skip


def check_how(cfg: LlamaConfig, *, table: Table, mesh: Mesh, options: Options) -> None:
    """ValueError for options that do not exist, have no effect or do not go together; needs no data."""
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        known = ", ".join(Options.__annotations__)
        raise ValueError(f"option {unknown[0]!r} must be one of {known}. Correct its name.")
    remat = options.get("remat", "none")
    check_settings(
        remat, options.get("group", 1), options.get("offload", "none"), options.get("arena"), cfg.num_layers
    )
    tile, kernel = options.get("mlp_tile"), options.get("kernel", "auto")
    if tile is not None and (not _whole(tile) or tile < 1):
        raise ValueError(f"mlp_tile={tile} must be a whole number of at least 1. Leave it out for no tiles.")
    _check_chunks(options.get("head_chunks", 1), cfg, table, mesh)
    if kernel == "reference" and (options.get("head_chunks", 1) != 1 or "attention" in remat):
        raise ValueError(
            f"kernel='reference' must come without head_chunks and remat='attention', as it keeps nothing, "
            f"got head_chunks={options.get('head_chunks', 1)}, remat={remat!r}. Use kernel='tiled'."
        )


def check_kernel(
    kernel: str, cfg: LlamaConfig, *, device: torch.device, dtype: torch.dtype, seq_len: int, packed: bool
) -> None:
    """ValueError for an attention kernel that does not exist, or cannot run every layer of this model.

    `packed`: whether any rank's rows hold documents of unequal length, see `usp.Shard`.
    """
    if kernel not in (*KERNELS, "auto", "reference"):
        raise ValueError(
            f"kernel={kernel!r} must be one of auto, {', '.join(KERNELS)}, reference. Choose one."
        )
    if kernel == "reference":
        return
    windowed = any(window is not None and window < seq_len for window in cfg.windows)
    wanted = [name for name, needed in ((PACKED, packed), (WINDOW, windowed)) if needed]
    choose(kernel, device=device, dtype=dtype, size=cfg.head_dim, v_size=cfg.head_dim, features=wanted)


def _check_params(params: Params, cfg: LlamaConfig, table: Table, mesh: Mesh, *, cast: bool) -> None:
    """Every leaf that the configuration has, and no other, of this rank's shape at rest, and of one type if
    they are not all `cast`."""
    whole = abstract(cfg)

    def wanted(name: str, leaf: Leaf | None) -> tuple[int, ...] | None:
        spec = None if leaf is None else spec_of(table.rest, name, leaf, table=table.name)
        return None if leaf is None or spec is None else local_shape(spec, leaf.shape, mesh)

    ends = ("embed", "norm", "lm_head")
    found = [(name, getattr(params, name), wanted(name, getattr(whole, name))) for name in ends]
    of_layer = [wanted(name, leaf) for name, leaf in zip(Block._fields, whole.layers[0], strict=True)]
    for i, layer in enumerate(params.layers):
        names = (f"layers.{i}.{name}" for name in Block._fields)
        found += zip(names, layer, of_layer, strict=True)
    for name, leaf, shape in found:
        got = None if leaf is None else tuple(leaf.shape)
        if got != shape:
            rule = "left out" if shape is None else f"this rank's shard {shape} at rest"
            raise ValueError(
                f"parameter {name}={got} must be {rule}, as the configuration has it. "
                f"Pass the configuration, table and mesh that the parameters were made with."
            )
        if leaf is not None and not cast and leaf.dtype != params.embed.dtype:
            raise ValueError(
                f"parameter {name}={leaf.dtype} must be of the type of all, got embed={params.embed.dtype}. "
                f"Cast it, or pass dtype= to compute in."
            )


def _check_shard(params: Params, shard: Shard, cfg: LlamaConfig) -> None:
    tokens = shard.tokens
    if shard.num_ids > cfg.vocab_size:
        raise ValueError(
            f"token id={shard.num_ids - 1} must be below the model's vocabulary, got vocab_size="
            f"{cfg.vocab_size}. Use the tokenizer that belongs to the model, or correct the labels."
        )
    for name, like, kinds in (("labels", shard.labels, _IDS), ("positions", shard.positions, _WHOLE)):
        if like.shape != tokens.shape or like.dtype not in kinds or like.device != tokens.device:
            raise ValueError(
                f"{name}={tuple(like.shape)} {like.dtype} on {like.device} must be {kinds[0]} like the "
                f"tokens, got tokens={tuple(tokens.shape)} on {tokens.device}. Take what shard_batch made."
            )
    if tokens.device != params.embed.device:
        raise ValueError(
            f"tokens on device={tokens.device} must be where the parameters are, got {params.embed.device}. "
            f"Pass device= to shard_batch."
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
