"""The files of one checkpoint: what is in them, how they are written and checked."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from usp.mesh import MeshLike, P, axis_sizes, local_slices
from usp.mesh.devices import coordinates

FORMAT = 1
INDEX, MARKER = "index.json", "complete"
_FOLDER = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"rank-\d{5,}\.safetensors")
Ranges = tuple[tuple[int, int], ...]
"""Start and stop in each dimension of the global tensor."""


class Damaged(ValueError):
    """What is wrong with a checkpoint, without its name."""


class Placed(NamedTuple):
    """A tensor of which this rank holds one shard."""

    local: Tensor
    spec: P
    shape: tuple[int, ...]  # global


class Piece(NamedTuple):
    """What this rank writes of one tensor."""

    value: Tensor
    ranges: Ranges
    shape: tuple[int, ...]  # global


@dataclass(frozen=True)
class Shard:
    """A part of a tensor in a file, under the tensor's own name."""

    file: str
    ranges: Ranges
    crc32: int


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint. `dtype` in torch's spelling, without the prefix."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds. `meta`: what the caller wanted to keep beside the tensors, as JSON."""

    step: int
    meta: Mapping[str, Any]
    tensors: Mapping[str, Entry]


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def steps_in(root: Path) -> list[int]:
    """Steps of the finished checkpoints below `root`, newest first. Whether they are whole is not checked."""
    names = [_FOLDER.fullmatch(p.name) for p in root.iterdir()] if root.is_dir() else []
    return sorted((int(m[1]) for m in names if m and (root / m[0] / MARKER).is_file()), reverse=True)


def ranges_of(slices: Sequence[slice]) -> Ranges:
    return tuple((s.start, s.stop) for s in slices)


def own_pieces(tensors: Mapping[str, Placed], mesh: MeshLike) -> dict[str, Piece]:
    """What this rank writes so that every element is written once: copies take turns, tensor by tensor."""
    sizes, at, out = axis_sizes(mesh), coordinates(mesh), {}
    for number, (name, (local, spec, shape)) in enumerate(tensors.items()):
        slices = local_slices(spec, shape, mesh)
        if tuple(local.shape) != tuple(s.stop - s.start for s in slices):
            raise ValueError(
                f"{name}={tuple(local.shape)} must be this rank's shard of {shape} at {spec}. Pass the "
                "global shape and the placement that it has."
            )
        turn, copies = 0, 1
        for axis in (a for a in sizes if a not in spec.axes):
            turn, copies = turn * sizes[axis] + at[axis], copies * sizes[axis]
        if local.numel() and turn == number % copies:
            out[name] = Piece(local.detach(), ranges_of(slices), shape)
    return out


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_pieces(folder: Path, file: str, pieces: Mapping[str, Piece]) -> dict[str, Entry]:
    """Write one file, on disk when this returns, and say what is in it. Raises OSError."""
    if not folder.is_dir():
        raise OSError(f"{folder.parent} must be a folder that every process sees. Use a shared file system.")
    if not pieces:
        return {}
    try:
        save_file({name: piece.value for name, piece in pieces.items()}, folder / file)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    sync(folder / file)
    return {name: _entry(file, piece) for name, piece in pieces.items()}


def _entry(file: str, piece: Piece) -> Entry:
    shard = Shard(file, piece.ranges, checksum(piece.value))
    return Entry(piece.shape, str(piece.value.dtype).removeprefix("torch."), (shard,))


def checksum(value: Tensor) -> int:
    array: Any = value.contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(array)


def merged(parts: Sequence[Mapping[str, Entry]]) -> dict[str, Entry]:
    """The entries of all ranks' files as one table."""
    out: dict[str, Entry] = {}
    for name, entry in (item for part in parts for item in part.items()):
        shards = (*out[name].shards, *entry.shards) if name in out else entry.shards
        out[name] = Entry(entry.shape, entry.dtype, shards)
    return out


def write_index(folder: Path, index: Index) -> None:
    """The index, then the marker that makes the folder a checkpoint; both on disk when this returns."""
    tensors = {name: asdict(entry) for name, entry in index.tensors.items()}
    whole = {"format": FORMAT, "step": index.step, "meta": dict(index.meta), "tensors": tensors}
    text = json.dumps(whole, allow_nan=False).encode()
    for name, data in ((INDEX, text), (MARKER, hashlib.sha256(text).hexdigest().encode())):
        with open(folder / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    sync(folder)


def read_index(folder: Path) -> Index:
    """Raises Damaged unless the index is the one that was written."""
    try:
        text, marker = (folder / INDEX).read_bytes(), (folder / MARKER).read_bytes()
    except OSError as error:
        raise Damaged(f"it cannot be read: {error.strerror}") from None
    if hashlib.sha256(text).hexdigest().encode() != marker:
        raise Damaged(f"{INDEX} is not the one that was written")
    try:
        whole = json.loads(text)
        if whole["format"] != FORMAT:
            raise Damaged(f"its format is {whole['format']}, and {FORMAT} is the one that can be read")
        return Index(whole["step"], whole["meta"], {n: _parsed(e) for n, e in whole["tensors"].items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"{INDEX} is not as it should be: {error!r}") from None


def _parsed(entry: Any) -> Entry:
    shape, shards = tuple(entry["shape"]), []
    for shard in entry["shards"]:
        ranges = tuple((start, stop) for start, stop in shard["ranges"])
        fits = len(ranges) == len(shape) and all(
            0 <= a < b <= n for (a, b), n in zip(ranges, shape, strict=False)
        )
        if not fits or not _FILE.fullmatch(shard["file"]):
            raise Damaged(f"{INDEX} names {shard['file']!r} with {ranges} of {shape}")
        shards.append(Shard(shard["file"], ranges, shard["crc32"]))
    if not isinstance(getattr(torch, entry["dtype"], None), torch.dtype):
        raise Damaged(f"{INDEX} names the unknown dtype {entry['dtype']!r}")
    return Entry(shape, entry["dtype"], tuple(shards))


def verify_file(folder: Path, file: str, index: Index) -> None:
    """Every shard in one file against its checksum. Raises Damaged."""
    held = {n: (e, s) for n, e in index.tensors.items() for s in e.shards if s.file == file}
    try:
        with safe_open(folder / file, framework="pt") as opened:
            for name, (entry, shard) in held.items():
                value = opened.get_tensor(name)
                wanted = (lengths(shard.ranges), f"torch.{entry.dtype}")
                like = (tuple(value.shape), str(value.dtype)) == wanted
                if not like or checksum(value) != shard.crc32:
                    raise Damaged(f"{name} in {file} is not what was written")
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{file} cannot be read: {error}") from None


def lengths(ranges: Ranges) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in ranges)


def num_elements(ranges: Ranges) -> int:
    return math.prod(lengths(ranges))


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
