"""Hugging Face checkpoints to functional parameters and back, and the project's own format."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from usp.mesh import P, Table, local_shape, local_slices, redistribute
from usp.models.config import LlamaConfig
from usp.models.hf_files import carry, merged_config, read_json, read_source
from usp.models.hf_names import hf_map, is_derived
from usp.models.params import Leaf, Mesh, Params, abstract, map_params, named_leaves, placement, spec_of
from usp.models.reader import Checkpoint, check_tensors, open_checkpoint
from usp.models.writer import Entry, together, write_checkpoint, write_json

_ROWS = 4096  # of the two matrices compared at a time
_OWN = "usp.json"
_FORMAT = 1


def from_hf(
    path: str | os.PathLike[str],
    *,
    table: Table | None = None,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> tuple[LlamaConfig, Params]:
    """Read a Hugging Face directory: (cfg, params), this rank's shards at rest when table and mesh are given.

    Every header is checked before the first tensor is read: one ValueError, on every rank alike, names all
    missing, surplus, misshaped and damaged tensors. Each rank reads its own slices only. `dtype` None keeps
    each tensor's own. One small collective at the end, on several ranks.
    """
    placed = placement(table, mesh)
    with together(mesh):
        cfg = LlamaConfig.from_hf_dict(read_json(Path(path) / "config.json"))
        checkpoint = open_checkpoint(path)
        cfg = _resolve_tie(cfg, checkpoint)
        names = hf_map(cfg, checkpoint.tensors)
        params = _read_params(checkpoint, cfg, names, placed, dtype=dtype, device=device)
    return cfg, params


def to_hf(
    params: Params,
    cfg: LlamaConfig,
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    table: Table | None = None,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a Hugging Face directory that `from_pretrained` loads.

    Every rank calls this with its shards; each tensor is gathered (1 all-gather per sharded tensor) and rank
    0 writes. `source`, a model directory, gives its tokenizer and other side files and the fields of
    config.json that this project does not use. Raises on every rank, leaving nothing behind: ValueError when
    the target exists and is not empty or params do not fit cfg; OSError when writing fails.
    """
    with together(mesh):
        base, stored = read_source(source)
        names = hf_map(cfg, stored)
        main = dtype or _main_dtype(params)
        config = merged_config(cfg, base, dtype=str(main).removeprefix("torch."))

    def finish(directory: Path) -> None:
        write_json(directory / "config.json", config)
        carry(source, directory)

    _write(params, cfg, path, names, "model", table, mesh, dtype, max_shard_size, finish)


def save(
    params: Params,
    cfg: LlamaConfig,
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    table: Table | None = None,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write the project's own format: `usp.json` and safetensors with dotted names.

    As `to_hf` otherwise. The side files of `source`, its config.json included, come along, so that the
    directory can be the `source` of a later `to_hf`.
    """

    def finish(directory: Path) -> None:
        write_json(directory / _OWN, {"format": _FORMAT, "config": cfg.to_dict()})
        if source is not None and (Path(source) / "config.json").exists():
            shutil.copyfile(Path(source) / "config.json", directory / "config.json")
        carry(source, directory)

    with together(mesh):
        read_source(source)
        names = {dotted: [dotted] for dotted, _ in named_leaves(abstract(cfg))}
    _write(params, cfg, path, names, "params", table, mesh, dtype, max_shard_size, finish)


def load(
    path: str | os.PathLike[str],
    *,
    table: Table | None = None,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> tuple[LlamaConfig, Params]:
    """Read what `save` wrote; the checks and the arguments are those of `from_hf`."""
    placed = placement(table, mesh)
    with together(mesh):
        own = read_json(Path(path) / _OWN)
        if own.get("format") != _FORMAT:
            raise ValueError(
                f"format={own.get('format')!r} in {_OWN} must be {_FORMAT}. Convert the model again."
            )
        cfg = LlamaConfig.from_dict(own.get("config", {}))
        checkpoint = open_checkpoint(path, stem="params")
        names = {dotted: [dotted] for dotted, _ in named_leaves(abstract(cfg))}
        params = _read_params(checkpoint, cfg, names, placed, dtype=dtype, device=device)
    return cfg, params


def _resolve_tie(cfg: LlamaConfig, checkpoint: Checkpoint) -> LlamaConfig:
    """Transformers' rule: a tied checkpoint that stores two different matrices is untied, with a warning."""
    both = hf_map(cfg, checkpoint.tensors)["embed"]
    if len(both) < 2 or checkpoint.tensors[both[0]].shape != checkpoint.tensors[both[1]].shape:
        return cfg
    for start in range(0, checkpoint.tensors[both[0]].shape[0], _ROWS):
        rows = (slice(start, min(start + _ROWS, checkpoint.tensors[both[0]].shape[0])),)
        if not torch.equal(checkpoint.read(both[0], rows), checkpoint.read(both[1], rows)):
            warnings.warn(
                f"{checkpoint.root}: config.json ties the embeddings but {both[0]} and {both[1]} differ; "
                "they are kept apart.",
                stacklevel=3,
            )
            fields = {**cfg.to_dict(), "tie_embeddings": False}
            return LlamaConfig.from_dict(fields)
    return cfg


def _read_params(
    checkpoint: Checkpoint,
    cfg: LlamaConfig,
    names: Mapping[str, list[str]],
    placed: tuple[Table, Mesh] | None,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> Params:
    """Check all headers, then read this rank's slices."""
    tree = abstract(cfg)
    wanted = {name: leaf.shape for dotted, leaf in named_leaves(tree) for name in names[dotted]}
    check_tensors(checkpoint, wanted, ignored=filter(is_derived, checkpoint.tensors))

    def get(dotted: str, leaf: Leaf) -> Tensor:
        slices = tuple(slice(0, size) for size in leaf.shape)
        if placed is not None:
            spec = spec_of(placed[0].rest, dotted, leaf, table=placed[0].name)
            slices = local_slices(spec, leaf.shape, placed[1])
        return checkpoint.read(names[dotted][0], slices).to(device=device, dtype=dtype)

    return map_params(get, tree)


def _main_dtype(params: Params) -> torch.dtype:
    """Of the embedding: what config.json names when tensors differ."""
    embed: Tensor = params.embed
    return embed.dtype


def _write(
    params: Params,
    cfg: LlamaConfig,
    path: str | os.PathLike[str],
    names: Mapping[str, list[str]],
    stem: str,
    table: Table | None,
    mesh: Mesh | None,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    finish: Callable[[Path], None],
) -> None:
    placed = placement(table, mesh)
    leaves = dict(named_leaves(abstract(cfg)))
    local = dict(named_leaves(params))
    with together(mesh):
        _check_params(local, leaves, placed)
    owner = {name: dotted for dotted in leaves for name in names[dotted]}
    entries = [
        Entry(name, leaves[dotted].shape, dtype or local[dotted].dtype) for name, dotted in owner.items()
    ]

    def produce(name: str) -> Tensor:
        dotted = owner[name]
        return _gather(local[dotted].detach(), leaves[dotted], dotted, placed)

    write_checkpoint(
        path, entries, produce, stem=stem, max_shard_size=max_shard_size, mesh=mesh, finish=finish
    )


def _gather(value: Tensor, leaf: Leaf, dotted: str, placed: tuple[Table, Mesh] | None) -> Tensor:
    if placed is None:
        return value
    spec = spec_of(placed[0].rest, dotted, leaf, table=placed[0].name)
    whole = P(*(None for _ in leaf.shape))
    with torch.no_grad():
        return redistribute(
            value, spec, whole, placed[1], shape=leaf.shape
        )  # rest -> replicated: 1 all-gather


def _check_params(
    local: Mapping[str, Tensor], leaves: Mapping[str, Leaf], placed: tuple[Table, Mesh] | None
) -> None:
    """The tree is the one that cfg describes, with this rank's shapes."""
    problems = [f"{name} is missing" for name in leaves if name not in local]
    problems += [f"{name} is not part of it" for name in local if name not in leaves]
    for name in leaves.keys() & local.keys():
        shape = leaves[name].shape
        if placed is not None:
            spec = spec_of(placed[0].rest, name, leaves[name], table=placed[0].name)
            shape = tuple(local_shape(spec, shape, placed[1]))
        if tuple(local[name].shape) != shape:
            problems.append(f"{name} has shape {tuple(local[name].shape)} instead of {shape}")
    if problems:
        raise ValueError(
            f"params must be the tree of cfg: {'; '.join(sorted(problems))}. Correct cfg or params."
        )
