"""Reading a directory of safetensors files: one index of everything, then slices."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_PICKLE = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHOWN = 6


@dataclass(frozen=True)
class Stored:
    """Where a tensor is and what its header says; `dtype` in safetensors' spelling."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The tensors of a directory. Only headers are read until `read` asks for a slice."""

    def __init__(self, root: Path, tensors: dict[str, Stored]) -> None:
        self.root = root
        self.tensors = tensors
        self._name = ""
        self._open: Any = None

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """That part of one tensor, in its stored dtype. ValueError when the bytes cannot be read."""
        file = self.tensors[name].file
        try:
            if file != self._name:  # tensors come in file order mostly: one open file is enough
                self._open, self._name = safe_open(self.root / file, framework="pt"), file
            part: Tensor = self._open.get_slice(name)[slices]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.root / file}: tensor {name!r} cannot be read: {error}.") from error
        return part


def open_checkpoint(path: str | os.PathLike[str], *, stem: str = "model") -> Checkpoint:
    """Headers of `<stem>.safetensors`, or of all files in `<stem>.safetensors.index.json`.

    One ValueError names every damaged or missing file and every entry of the index that disagrees with the
    files. Pickle checkpoints are never loaded.
    """
    root = _directory(path)
    single, index = root / f"{stem}.safetensors", root / f"{stem}.safetensors.index.json"
    if single.exists() and index.exists():
        raise ValueError(
            f"{root} must hold one checkpoint, got both {single.name} and {index.name}. Remove the stale one."
        )
    if not single.exists() and not index.exists():
        raise ValueError(_nothing(root, single.name))
    problems: list[str] = []
    weight_map = _read_index(index, problems) if index.exists() else None
    files = [single.name] if weight_map is None else sorted(set(weight_map.values()))
    tensors: dict[str, Stored] = {}
    for file in files:
        _read_header(root, file, tensors, problems)
    if weight_map is not None and not problems:
        _compare_index(weight_map, tensors, problems)
    if problems:
        raise ValueError(f"checkpoint {root} is damaged: {'; '.join(problems)}.")
    return Checkpoint(root, tensors)


def _directory(path: str | os.PathLike[str]) -> Path:
    root = Path(path)
    if not root.is_dir():
        raise ValueError(
            f"path={str(path)!r} must be a checkpoint directory on this machine. "
            "Download the model first; nothing is fetched from the network."
        )
    return root


def _nothing(root: Path, wanted: str) -> str:
    pickles = sorted(p.name for p in root.iterdir() if p.suffix in _PICKLE)
    if pickles:
        return (
            f"{root} holds only pickle checkpoints ({shorten(pickles)}), which can run code when loaded "
            "and are never read. Save the model with safetensors first."
        )
    return f"{root} must hold {wanted} or {wanted}.index.json, got neither. Check the directory."


def _read_index(index: Path, problems: list[str]) -> dict[str, str]:
    """tensor name -> file name, files inside the directory only."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = dict(weight_map.items())
        if not pairs or not all(isinstance(v, str) for v in pairs.values()):
            raise TypeError("weight_map must name a file for each tensor")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(
            f"{index} must be an index with a weight_map, got {error!r}. Restore the file."
        ) from error
    for file in sorted(set(pairs.values())):
        pure = PurePosixPath(file)
        if pure.is_absolute() or ".." in pure.parts or "\\" in file or pure.suffix != ".safetensors":
            problems.append(f"index entry {file!r} must be a .safetensors file inside the directory")
            pairs = {name: f for name, f in pairs.items() if f != file}
    return pairs


def _read_header(root: Path, file: str, tensors: dict[str, Stored], problems: list[str]) -> None:
    if not (root / file).is_file():
        problems.append(f"file {file} is missing")
        return
    try:
        with safe_open(root / file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                view = handle.get_slice(name)
                if name in tensors:
                    problems.append(f"tensor {name} is in both {tensors[name].file} and {file}")
                tensors[name] = Stored(file, tuple(view.get_shape()), view.get_dtype())
    except (SafetensorError, OSError) as error:
        problems.append(f"file {file} is truncated or damaged ({error})")


def _compare_index(weight_map: dict[str, str], tensors: dict[str, Stored], problems: list[str]) -> None:
    absent = [n for n, file in weight_map.items() if n not in tensors or tensors[n].file != file]
    unlisted = [n for n in tensors if n not in weight_map]
    if absent:
        problems.append(f"the index names tensors that are not in their file: {shorten(absent)}")
    if unlisted:
        problems.append(f"the files hold tensors that the index does not name: {shorten(unlisted)}")


def shorten(names: Iterable[str]) -> str:
    """A few names and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def check_tensors(
    checkpoint: Checkpoint, wanted: dict[str, tuple[int, ...]], *, ignored: Iterable[str] = ()
) -> None:
    """Exactly the tensors of `wanted`, name -> shape, in floating point. ValueError names each difference."""
    skipped = set(ignored)
    have = {name: stored for name, stored in checkpoint.tensors.items() if name not in skipped}
    missing = [name for name in wanted if name not in have]
    surplus = [name for name in have if name not in wanted]
    common = [name for name in wanted if name in have]
    shapes = [f"{n} {have[n].shape} instead of {wanted[n]}" for n in common if have[n].shape != wanted[n]]
    dtypes = [f"{n} {have[n].dtype}" for n in common if have[n].dtype not in DTYPES]
    problems = [
        f"{what} {shorten(names)}"
        for what, names in (
            ("missing tensors:", missing),
            ("surplus tensors:", surplus),
            ("wrong shapes:", shapes),
            (f"dtypes other than {', '.join(DTYPES)}:", dtypes),
        )
        if names
    ]
    if problems:
        raise ValueError(
            f"checkpoint {checkpoint.root} must hold the tensors of its config: {'; '.join(problems)}. "
            "Correct config.json or the files."
        )
