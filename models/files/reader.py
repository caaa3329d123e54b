"""Reading a directory of safetensors files: one index of everything, then slices."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from torch import Tensor

from usp.models.files.safefile import DTYPES, PIECE, Damaged, Stored, load_json, read_header, read_slice

_PICKLE = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHOWN = 6


@dataclass
class Checkpoint:
    """The tensors of a directory. Only headers are read until `read` asks for a slice.

    `problems`: everything wrong with the files. `lost`: tensors that the index puts into files that cannot be
    read; None: a whole checkpoint is lost with them. `num_read`: bytes of tensors read so far. `not_finite`:
    names of tensors with NaN or infinite values in what was read.
    """

    root: Path
    tensors: dict[str, Stored] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    lost: set[str] | None = field(default_factory=set)
    num_read: int = 0
    not_finite: set[str] = field(default_factory=set)

    def read(self, name: str, slices: Sequence[slice]) -> Tensor:
        """That part of one tensor, in its stored dtype and memory of its own. OSError if it cannot be."""
        stored = self.tensors[name]
        part = read_slice(self.root / stored.file, stored, slices)
        self.num_read += part.nbytes
        flat, step = part.view(-1), PIECE // part.itemsize
        pieces = (flat[start : start + step] for start in range(0, flat.numel(), step))
        if name not in self.not_finite and not all(bool(piece.isfinite().all()) for piece in pieces):
            self.not_finite.add(name)
        return part

    def read_whole(self, name: str) -> Tensor:
        return self.read(name, [slice(0, size) for size in self.tensors[name].shape])


def open_checkpoint(path: str | os.PathLike[str], *, stem: str = "model") -> Checkpoint:
    """Headers of `<stem>.safetensors`, or of all files in `<stem>.safetensors.index.json`.

    What is damaged, missing or disagrees with the index is in the result's `problems`, all of it. ValueError
    when there is no directory. Pickle checkpoints are never loaded.
    """
    root = directory(path)
    found = Checkpoint(root)
    single, index = root / f"{stem}.safetensors", root / f"{stem}.safetensors.index.json"
    weight_map: dict[str, str] | None = None
    if single.exists() and index.exists():
        found.problems.append(f"got both {single.name} and {index.name}. Remove the stale one")
        found.lost = None
    elif index.exists():
        weight_map = _read_index(index, found)
        for file in sorted(set(weight_map.values())):
            _add(file, found, [name for name, f in weight_map.items() if f == file])
        _compare_index(weight_map, found)
    elif single.exists():
        _add(single.name, found, None)
    else:
        found.problems.append(_nothing(root, single.name))
        found.lost = None
    return found


def directory(path: str | os.PathLike[str]) -> Path:
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
            f"{root} holds only pickle checkpoints ({shorten(pickles)}), which can run code when loaded and "
            f"are never read. If you trust their origin, convert them first: {_command(root)}"
        )
    return f"{root} must hold {wanted} or {wanted}.index.json, got neither. Check the directory"


def _command(root: Path) -> str:
    """Turns a pickle checkpoint into safetensors; Transformers loads tensors only, no other objects."""
    code = (
        "from transformers import AutoModelForCausalLM as M; "
        f"M.from_pretrained({str(root)!r}, dtype='auto').save_pretrained({f'{root}-safetensors'!r})"
    )
    return f"python -c {shlex.quote(code)}"


def _read_index(index: Path, found: Checkpoint) -> dict[str, str]:
    """tensor name -> file name, files inside the directory only."""
    try:
        weight_map = load_json(index.read_bytes())["weight_map"]
        pairs = dict(weight_map.items())
        if not pairs or not all(isinstance(value, str) for value in pairs.values()):
            raise TypeError("weight_map must name a file for each tensor")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        found.problems.append(f"{index.name} must be an index with a weight_map, got {error!r}")
        found.lost = None
        return {}
    for file in sorted(set(pairs.values())):
        pure = PurePosixPath(file)
        inside = not pure.is_absolute() and ".." not in pure.parts and "\\" not in file and file.isprintable()
        if not inside or pure.suffix != ".safetensors":
            found.problems.append(f"index entry {file!r} must be a .safetensors file inside the directory")
            _lose(found, [name for name, f in pairs.items() if f == file])
            pairs = {name: f for name, f in pairs.items() if f != file}
    return pairs


def _add(file: str, found: Checkpoint, listed: Collection[str] | None) -> None:
    try:
        tensors = read_header(found.root, file)
    except FileNotFoundError:
        found.problems.append(f"file {file} is missing")
        return _lose(found, listed)
    except (Damaged, OSError) as error:
        found.problems.append(f"file {file} is truncated or damaged: {error}")
        return _lose(found, listed)
    for name, stored in tensors.items():
        if name in found.tensors:
            found.problems.append(f"tensor {name} is in both {found.tensors[name].file} and {file}")
        found.tensors[name] = stored


def _lose(found: Checkpoint, names: Collection[str] | None) -> None:
    found.lost = None if names is None or found.lost is None else found.lost | set(names)


def _compare_index(weight_map: Mapping[str, str], found: Checkpoint) -> None:
    lost = found.lost or set()
    there = {name: stored.file for name, stored in found.tensors.items()}
    absent = [n for n, file in weight_map.items() if there.get(n) != file and n not in lost]
    unlisted = [n for n in there if n not in weight_map and n not in lost]
    if absent:
        found.problems.append(f"the index names tensors that are not in their file: {shorten(absent)}")
        _lose(found, absent)
    if unlisted and weight_map:
        found.problems.append(f"the files hold tensors that the index does not name: {shorten(unlisted)}")


def shorten(names: Iterable[str]) -> str:
    """A few names and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def tensor_problems(
    checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]], *, ignored: Iterable[str] = ()
) -> list[str]:
    """How the checkpoint differs from exactly the tensors of `wanted`, name -> shape, in floating point."""
    skipped, lost = set(ignored), checkpoint.lost
    have = {name: stored for name, stored in checkpoint.tensors.items() if name not in skipped}
    missing = [] if lost is None else [n for n in wanted if n not in have and n not in lost]
    surplus = [name for name in have if name not in wanted]
    common = [name for name in wanted if name in have]
    shapes = [f"{n} {have[n].shape} instead of {wanted[n]}" for n in common if have[n].shape != wanted[n]]
    dtypes = [f"{n} {have[n].dtype}" for n in common if have[n].dtype not in DTYPES]
    return [
        f"{what} {shorten(names)}"
        for what, names in (
            ("missing tensors:", missing),
            ("surplus tensors:", surplus),
            ("wrong shapes:", shapes),
            (f"dtypes other than {', '.join(DTYPES)}:", dtypes),
        )
        if names
    ]
