"""Reading a checkpoint: the newest one that is whole, and of it the slices that a rank needs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import safe_open
from torch import Tensor

from usp.mesh import MeshLike, P, local_slices
from usp.mesh.agree import Over, gather_objects, place
from usp.state.files import (
    Damaged,
    Index,
    Ranges,
    folder_of,
    lengths,
    num_elements,
    ranges_of,
    read_index,
    steps_in,
    verify_file,
)


class Last(NamedTuple):
    """`found`: the newest checkpoint that is whole, and what is wrong with each newer one, by step."""

    found: Index
    damaged: Mapping[int, str]


def open_last(root: Path, over: Over) -> Last | None:
    """Check every byte of the newest checkpoint below `root`, and of older ones until one is whole.

    The files are dealt over the ranks, and all come to the same result: a few exchanges of short strings.
    None when there is none at all; ValueError when there are some and all are damaged.
    """
    rank, num_ranks = place(over)
    damaged: dict[int, str] = {}
    for step in gather_objects(steps_in(root), over)[0]:  # of the first rank: all must look at the same
        problem, index = "", None
        try:
            index = read_index(folder_of(root, step))
            files = sorted({s.file for e in index.tensors.values() for s in e.shards})
            for file in files[rank::num_ranks]:
                verify_file(folder_of(root, step), file, index)
        except Damaged as error:
            problem = str(error)
        problems = [p for p in gather_objects(problem, over) if p]
        if not problems and index is not None:
            return Last(index, damaged)
        damaged[step] = problems[0]
    if damaged:
        what = "; ".join(f"step {step}: {problem}" for step, problem in damaged.items())
        raise ValueError(f"state={root} must hold a checkpoint that is whole, got {what}. Start a new run.")
    return None


def set_aside(root: Path, step: int) -> Path:
    """Rename a damaged checkpoint so that it counts no more; what is in it stays. For one rank."""
    old = folder_of(root, step)
    new = old.with_name(f"damaged-{old.name}")
    shutil.rmtree(new, ignore_errors=True)
    os.rename(old, new)
    return new


class Reader:
    """Slices of the tensors of one checkpoint, as a context. Does not communicate."""

    def __init__(self, root: Path, index: Index) -> None:
        self.index, self._folder = index, folder_of(root, index.step)
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def shard(self, name: str, spec: P, shape: tuple[int, ...], mesh: MeshLike) -> Tensor:
        """This rank's part of a tensor that must have the global `shape`, whatever mesh wrote it.

        In memory of its own, on the CPU. Raises ValueError when the checkpoint has no such tensor.
        """
        entry = self.index.tensors.get(name)
        if entry is None or entry.shape != shape:
            got = "no such tensor" if entry is None else f"shape {entry.shape}"
            raise ValueError(
                f"{name}={shape} must be in the checkpoint of step {self.index.step}, got {got}. Resume with "
                "the model that was trained."
            )
        return self._read(name, ranges_of(local_slices(spec, shape, mesh)))

    def whole(self, name: str) -> Tensor | None:
        """A tensor as it was saved, None when there is none of that name."""
        entry = self.index.tensors.get(name)
        return None if entry is None else self._read(name, tuple((0, n) for n in entry.shape))

    def _read(self, name: str, wanted: Ranges) -> Tensor:
        entry = self.index.tensors[name]
        out = torch.empty(lengths(wanted), dtype=getattr(torch, entry.dtype))
        found = 0
        for shard in entry.shards:
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, shard.ranges, strict=True)]
            if any(start >= stop for start, stop in both):
                continue
            inside = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, shard.ranges, strict=True))
            place = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, wanted, strict=True))
            file = self._open(shard.file)
            out[place] = file.get_slice(name)[inside] if inside else file.get_tensor(name)
            found += num_elements(tuple(both))
        if found != out.numel():
            raise Damaged(f"{name} must be there as a whole, got {found} of {out.numel()} elements.")
        return out

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
        return self._files[file]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()
