"""Hugging Face checkpoints to functional parameters and back, and the project's own format."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from usp.mesh import P, Table, local_shape, local_slices, redistribute
from usp.mesh.agree import agree, place
from usp.models.config import LlamaConfig
from usp.models.files.hf_files import merged_config, read_source, write_hf_files, write_own_files
from usp.models.files.hf_names import hf_map
from usp.models.files.source import Source, open_hf, open_own, warn_not_finite
from usp.models.files.writer import Entry, write_checkpoint
from usp.models.params import Leaf, Mesh, Params, abstract, map_params, named_leaves, placement, spec_of


def from_hf(
    path: str | os.PathLike[str],
    *,
    table: Table | None = None,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> tuple[LlamaConfig, Params]:
    """Read a Hugging Face directory: (cfg, params), this rank's shards at rest when table and mesh are given.

    Every header is checked before the first tensor is read: one ValueError, on every rank alike, names all
    missing, surplus, misshaped and damaged tensors and what config.json has wrong. Each rank reads its own
    slices only, into memory of their own. `dtype` None keeps each tensor's own. `progress`: a bar on the
    first rank. A few exchanges of short strings, on several ranks. Warns of values that are not finite.
    """
    placed = placement(table, mesh)
    return _read(open_hf(path, mesh), placed, dtype=dtype, device=device, progress=progress)


def load(
    path: str | os.PathLike[str],
    *,
    table: Table | None = None,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> tuple[LlamaConfig, Params]:
    """Read what `save` wrote; the checks and the arguments are those of `from_hf`."""
    placed = placement(table, mesh)
    return _read(open_own(path, mesh), placed, dtype=dtype, device=device, progress=progress)


def _read(
    source: Source,
    placed: tuple[Table, Mesh] | None,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    progress: bool,
) -> tuple[LlamaConfig, Params]:
    """This rank's slices of every tensor."""
    mesh = placed[1] if placed else None
    checkpoint, tree = source.checkpoint, abstract(source.cfg)

    def slices_of(dotted: str, leaf: Leaf) -> tuple[slice, ...]:
        if placed is None:
            return tuple(slice(0, size) for size in leaf.shape)
        spec = spec_of(placed[0].rest, dotted, leaf, table=placed[0].name)
        return local_slices(spec, leaf.shape, placed[1])

    def read_all() -> Params:
        shown = progress and place(mesh)[0] == 0
        with tqdm(total=len(source.names), desc="read", unit="tensor", disable=not shown) as bar:

            def get(dotted: str, leaf: Leaf) -> Tensor:
                part = checkpoint.read(source.names[dotted][0], slices_of(dotted, leaf))
                bar.update()
                return part.to(device=device, dtype=dtype)

            return map_params(get, tree)

    params = agree(read_all, mesh)
    warn_not_finite(checkpoint)
    return source.cfg, params


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
    progress: bool = False,
    between: Callable[[], object] | None = None,
) -> None:
    """Write a Hugging Face directory that `from_pretrained` loads.

    Every rank calls this with its shards; each tensor is gathered (1 all-gather for each axis of more than 1
    that cuts it) and rank 0 writes, one tensor at a time. `source`, a model directory in either format, gives
    its tokenizer and other side files, the fields of config.json that this project does not use, and, with
    tied embeddings, the names under which the matrix is stored; without it, the embedding's alone. `between`
    is called before each tensor, on every rank; a BaseException that is no Exception, raised by it on all of
    them, gives it all up.
    Raises on every rank, leaving nothing behind: ValueError when the target exists and is not empty, params
    do not fit cfg or values do not fit dtype; OSError when writing fails.
    """

    def prepare() -> tuple[dict[str, list[str]], Callable[[Path], None]]:
        base, stored = read_source(source)
        config = merged_config(cfg, base, dtype=dtype or _main_dtype(params))
        return hf_map(cfg, stored), lambda directory: write_hf_files(directory, config, source)

    names, finish = agree(prepare, mesh)
    _write(params, cfg, path, names, "model", table, mesh, dtype, max_shard_size, finish, progress, between)


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
    progress: bool = False,
) -> None:
    """Write the project's own format: `usp.json` and safetensors with dotted names.

    As `to_hf` otherwise. The side files of `source`, its config.json included, come along, so that the
    directory can be the `source` of a later `to_hf`.
    """
    stored = agree(lambda: read_source(source)[1], mesh)
    names = {dotted: [dotted] for dotted, _ in named_leaves(abstract(cfg))}

    def finish(directory: Path) -> None:
        write_own_files(directory, cfg, stored, source)

    _write(params, cfg, path, names, "params", table, mesh, dtype, max_shard_size, finish, progress)


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
    progress: bool,
    between: Callable[[], object] | None = None,
) -> None:
    placed = placement(table, mesh)
    leaves = dict(named_leaves(abstract(cfg)))
    local = dict(named_leaves(params))
    agree(lambda: _check_params(local, leaves, placed), mesh)
    owner = {name: dotted for dotted in leaves for name in names[dotted]}
    entries = [
        Entry(name, leaves[dotted].shape, dtype or local[dotted].dtype) for name, dotted in owner.items()
    ]

    def produce(name: str) -> Tensor:
        if between is not None:
            between()
        dotted = owner[name]
        return _gather(local[dotted].detach(), leaves[dotted], dotted, placed)

    write_checkpoint(
        path,
        entries,
        produce,
        stem=stem,
        max_shard_size=max_shard_size,
        over=mesh,
        finish=finish,
        progress=progress,
    )


def _gather(value: Tensor, leaf: Leaf, dotted: str, placed: tuple[Table, Mesh] | None) -> Tensor:
    if placed is None:
        return value
    spec = spec_of(placed[0].rest, dotted, leaf, table=placed[0].name)
    whole = P(*(None for _ in leaf.shape))
    with torch.no_grad():
        return redistribute(value, spec, whole, placed[1], shape=leaf.shape)  # rest -> replicated


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
