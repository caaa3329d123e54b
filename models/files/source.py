"""A directory to read a model from, in either format, with everything checked before the first tensor."""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from usp.mesh.agree import Over, agree, gather_objects, place
from usp.models.config import LlamaConfig
from usp.models.files.hf_files import FORMAT, OWN, read_json, stored_as
from usp.models.files.hf_names import EMBED, HEAD, hf_map, is_derived
from usp.models.files.reader import Checkpoint, directory, open_checkpoint, shorten, tensor_problems
from usp.models.params import abstract, named_leaves

_ROWS = 2**20  # elements of the two matrices compared at a time


@dataclass(frozen=True)
class Source:
    """`names`: dotted name -> tensors that hold it, the first one to be read. `base`: its config.json.

    `stored`: the names under which a Hugging Face checkpoint holds, or held, its tensors.
    """

    cfg: LlamaConfig
    checkpoint: Checkpoint
    names: dict[str, list[str]]
    base: dict[str, Any] = field(default_factory=dict)
    stored: frozenset[str] = frozenset()


def open_hf(path: str | os.PathLike[str], over: Over) -> Source:
    """A Hugging Face directory. One ValueError, on every rank alike, names everything that is wrong with it.

    Two small exchanges. A checkpoint that stores a tied embedding twice is compared, each rank its share of
    rows.
    """
    source = _alike(lambda: _look(path), over)
    return _resolve_tie(source, over)


def open_own(path: str | os.PathLike[str], over: Over) -> Source:
    """A directory that `save` wrote, checked as `open_hf` does."""
    return _alike(lambda: _look_own(path), over)


def _alike(look: Callable[[], Source], over: Over) -> Source:
    """The source, which must be the same one on every rank."""
    source = agree(look, over)
    print_ = zlib.crc32(repr((source.cfg, sorted(source.checkpoint.tensors.items()))).encode())
    prints = gather_objects(print_, over)
    odd = [rank for rank, other in enumerate(prints) if other != prints[0]]
    if odd:
        raise ValueError(
            f"path={str(source.checkpoint.root)!r} must hold the same checkpoint for every rank, got another "
            f"one on ranks {odd} than on rank 0. Copy it again."
        )
    return source


def _look(path: str | os.PathLike[str]) -> Source:
    root = directory(path)
    problems: list[str] = []
    base: dict[str, Any] = {}
    cfg = None
    try:
        base = read_json(root / "config.json")
        cfg = LlamaConfig.from_hf_dict(base)
    except ValueError as error:
        problems.append(str(error).rstrip("."))
    checkpoint = open_checkpoint(root)
    problems += checkpoint.problems
    if cfg is None:
        raise _unusable(root, problems)
    stored = frozenset(checkpoint.tensors)
    return _checked(Source(cfg, checkpoint, hf_map(cfg, stored), base, stored), problems)


def _look_own(path: str | os.PathLike[str]) -> Source:
    root = directory(path)
    own = read_json(root / OWN)
    if own.get("format") != FORMAT:
        raise ValueError(f"format={own.get('format')!r} in {OWN} must be {FORMAT}. Convert the model again.")
    config = own.get("config")
    cfg = LlamaConfig.from_dict(config if isinstance(config, dict) else {})
    checkpoint = open_checkpoint(root, stem="params")
    names = {dotted: [dotted] for dotted, _ in named_leaves(abstract(cfg))}
    base = read_json(root / "config.json") if (root / "config.json").exists() else {}
    return _checked(
        Source(cfg, checkpoint, names, base, frozenset(stored_as(own))), list(checkpoint.problems)
    )


def _checked(source: Source, problems: list[str]) -> Source:
    leaves = named_leaves(abstract(source.cfg))
    wanted = {name: leaf.shape for dotted, leaf in leaves for name in source.names[dotted]}
    ignored = filter(is_derived, source.checkpoint.tensors)
    problems += tensor_problems(source.checkpoint, wanted, ignored=ignored)
    if problems:
        raise _unusable(source.checkpoint.root, problems)
    return source


def _unusable(root: Path, problems: list[str]) -> ValueError:
    return ValueError(
        f"checkpoint {root} must be whole and hold the tensors of its config: {'; '.join(problems)}. "
        "Correct config.json or restore the files."
    )


def _resolve_tie(source: Source, over: Over) -> Source:
    """Transformers' rule: a tied checkpoint that stores two different matrices is untied, with a warning."""
    if len(source.names["embed"]) < 2:
        return source
    rank, num_ranks = place(over)
    same = agree(lambda: _same_rows(source.checkpoint, rank, num_ranks), over)
    if all(gather_objects(same, over)):
        return source
    if rank == 0:
        warnings.warn(
            f"{source.checkpoint.root}: config.json ties the embeddings but {EMBED} and {HEAD} differ; "
            "they are kept apart.",
            stacklevel=4,
        )
    cfg = replace(source.cfg, tie_embeddings=False)
    return replace(source, cfg=cfg, names=hf_map(cfg, source.stored))


def _same_rows(checkpoint: Checkpoint, rank: int, num_ranks: int) -> bool:
    """Whether both matrices agree, bit by bit, in this rank's share of the rows."""
    embed, head = checkpoint.tensors[EMBED], checkpoint.tensors[HEAD]
    if embed.dtype != head.dtype:
        return False
    rows, width = embed.shape
    start, stop = rows * rank // num_ranks, rows * (rank + 1) // num_ranks
    step = max(1, _ROWS // width)
    for first in range(start, stop, step):
        part = (slice(first, min(first + step, stop)), slice(0, width))
        one, two = (checkpoint.read(name, part).view(torch.uint8) for name in (EMBED, HEAD))
        if not torch.equal(one, two):
            return False
    return True


def warn_not_finite(checkpoint: Checkpoint) -> None:
    """Say which tensors that were read hold NaN or infinite values; they are kept as they are."""
    if checkpoint.not_finite:
        warnings.warn(
            f"checkpoint {checkpoint.root} holds values that are not finite, in "
            f"{shorten(sorted(checkpoint.not_finite))}. They are kept.",
            stacklevel=3,
        )
