"""From one checkpoint directory to another without the model ever being in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from usp.mesh.agree import Over, agree
from usp.models.files.hf_files import OWN, merged_config, write_hf_files, write_own_files
from usp.models.files.hf_names import hf_map
from usp.models.files.safefile import DTYPES
from usp.models.files.source import Source, open_hf, open_own, warn_not_finite
from usp.models.files.writer import Entry, check_new_folder, write_checkpoint


def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: Literal["usp", "hf"],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    over: Over = None,
    progress: bool = False,
) -> None:
    """Read `src`, in whichever of the two formats it is, and write `dst` in the format `to`.

    One tensor is in memory at a time, and a few pieces of it. With `over` several ranks the files of `dst`
    are dealt over them; each reads what it writes and nothing else, and all must see both folders. The same
    checks, atomic result and errors as `from_hf` and `to_hf`; `dtype` None keeps each tensor's own.
    """
    agree(lambda: check_new_folder(dst, name="dst"), over)
    source = open_any(src, over)
    target, stem, finish = agree(lambda: _target(source, to, dtype, src), over)
    stored = source.checkpoint.tensors
    read_from = {name: source.names[dotted][0] for dotted, names in target.items() for name in names}
    entries = [
        Entry(name, stored[old].shape, dtype or DTYPES[stored[old].dtype]) for name, old in read_from.items()
    ]

    def produce(name: str) -> Tensor:
        return source.checkpoint.read_whole(read_from[name])

    write_checkpoint(
        dst,
        entries,
        produce,
        stem=stem,
        max_shard_size=max_shard_size,
        over=over,
        finish=finish,
        shared=True,
        progress=progress,
    )
    warn_not_finite(source.checkpoint)


def open_any(src: str | os.PathLike[str], over: Over) -> Source:
    """A directory in either format. Raises ValueError when it is neither."""

    def which() -> bool:
        own = (Path(src) / OWN).is_file()
        if not own and not (Path(src) / "config.json").is_file():
            raise ValueError(
                f"src={src} must be a Hugging Face model directory or one in usp's format, got "
                f"no config.json and no {OWN} in it. Correct the path."
            )
        return own

    return open_own(src, over) if agree(which, over) else open_hf(src, over)


def _target(
    source: Source, to: str, dtype: torch.dtype | None, src: str | os.PathLike[str]
) -> tuple[dict[str, list[str]], str, Callable[[Path], None]]:
    """(dotted name -> names in the files, stem of the files, what writes everything else)."""
    cfg = source.cfg
    if to == "usp":
        own = {dotted: [dotted] for dotted in source.names}
        return own, "params", lambda directory: write_own_files(directory, cfg, source.stored, src)
    embed = source.checkpoint.tensors[source.names["embed"][0]]
    config = merged_config(cfg, source.base, dtype=dtype or DTYPES[embed.dtype])
    return hf_map(cfg, source.stored), "model", lambda directory: write_hf_files(directory, config, src)
