"""Writing a directory of safetensors files: streamed, sharded, and visible only when complete."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from usp.mesh.agree import Over, agree, gather_objects, place
from usp.models.files.hf_files import write_json
from usp.models.files.safefile import PIECE, bytes_of, make_header
from usp.state.files import sync

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
Produce = Callable[[str], Tensor]


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its name in the file, global shape, dtype in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def parse_size(size: int | str) -> int:
    """Bytes in 5_000_000, "5MB", "5GB", "5TB" (powers of ten) or "5GiB"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", str(size).strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    count = int(float(match[1]) * unit) if match and unit else 0
    if count < 1:
        raise ValueError(
            f'max_shard_size={size!r} must be a positive size, got no number of bytes. Write "5GB".'
        )
    return count


def check_new_folder(path: str | os.PathLike[str], *, name: str) -> Path:
    """The absolute path. ValueError, calling it `name`, unless it is new or an empty folder."""
    target = Path(path).absolute()
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise ValueError(
            f"{name}={path} must be new or an empty folder, got one with content or a file or link. "
            f"Give another {name}."
        )
    return target


def plan_files(entries: Sequence[Entry], *, stem: str, max_bytes: int) -> dict[str, list[Entry]]:
    """File name -> its tensors, filled greedily in order; a larger tensor has a file of its own."""
    groups: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if groups[-1] and filled + entry.num_bytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += entry.num_bytes
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def write_checkpoint(
    path: str | os.PathLike[str],
    entries: Sequence[Entry],
    produce: Produce,
    *,
    stem: str,
    max_shard_size: int | str,
    over: Over,
    finish: Callable[[Path], None],
    shared: bool = False,
    progress: bool = False,
) -> None:
    """Write `entries` as safetensors, then `finish(directory)` for the other files, then rename into place.

    Every rank calls this. `produce(name)` gives a whole tensor. By default it is called on every rank in the
    same order, may communicate, and rank 0 writes; one tensor is held at a time. With `shared` it must not
    communicate: files are dealt over the ranks, all of which must see the target's folder. Raises on every
    rank: ValueError when the target exists and is not an empty folder, OSError when writing fails; nothing is
    left behind. A killed process leaves a hidden folder beside the target, which a later call does not need.
    """
    rank, num_ranks = place(over)
    lead = rank == 0
    files = agree(lambda: plan_files(entries, stem=stem, max_bytes=parse_size(max_shard_size)), over)
    outer = agree(lambda: _make_scratch(path) if lead else None, over)
    mine = [f for i, f in enumerate(files) if (i % num_ranks == rank if shared else lead)]
    try:
        scratch = gather_objects(outer, over)[0] if shared else outer
        total = sum(entry.num_bytes for file in mine for entry in files[file])
        shown = progress and lead
        with tqdm(total=total, unit="B", unit_scale=True, desc="write", disable=not shown) as bar:
            if shared:
                assert scratch is not None
                agree(lambda: _write_own(scratch / "new", {f: files[f] for f in mine}, produce, bar), over)
            else:
                _write_together(scratch and scratch / "new", files, produce, bar, over)
        agree(lambda: _publish(outer, Path(path).absolute(), files, stem, finish), over)
    finally:
        if outer is not None:
            shutil.rmtree(outer, ignore_errors=True)


def _make_scratch(path: str | os.PathLike[str]) -> Path:
    """A folder nobody else has, beside the target; what is in its `new` becomes the target."""
    target = check_new_folder(path, name="path")
    target.parent.mkdir(parents=True, exist_ok=True)
    outer = Path(tempfile.mkdtemp(prefix=f".{target.name[:100]}.", suffix=".tmp", dir=target.parent))
    (outer / "new").mkdir()  # with the permissions that the user's mask gives, unlike mkdtemp's
    return outer


def _write_own(directory: Path, files: Mapping[str, list[Entry]], produce: Produce, bar: tqdm) -> None:
    if not directory.is_dir():
        raise ValueError(f"path={directory.parent.parent} must be a folder that every process sees.")
    for file, group in files.items():
        with _open(directory / file, group) as put:
            for entry in group:
                put(entry, produce(entry.name))
                bar.update(entry.num_bytes)


def _write_together(
    directory: Path | None, files: Mapping[str, list[Entry]], produce: Produce, bar: tqdm, over: Over
) -> None:
    """All ranks produce; rank 0 (`directory` given) writes. Its failure is told after each file."""
    for file, group in files.items():
        failure: Exception | None = None
        left = iter(group)
        try:
            if directory is not None:
                with _open(directory / file, group) as put:
                    for entry in left:
                        value = produce(entry.name)
                        put(entry, value)
                        del value
                        bar.update(entry.num_bytes)
        except Exception as error:  # told below, where every rank hears of it
            failure = error
        for entry in left:  # other ranks, and rank 0 after it failed: they communicate in produce
            produce(entry.name)

        def told(failure: Exception | None = failure) -> None:
            if failure is not None:
                raise failure

        agree(told, over)


@contextmanager
def _open(path: Path, entries: Sequence[Entry]) -> Iterator[Callable[[Entry, Tensor], None]]:
    """`put(entry, value)` writes one tensor to its place in a new file; on disk when the block ends."""
    header, starts = make_header([(e.name, e.dtype, e.shape) for e in entries])
    with open(path, "xb", buffering=0) as file:
        write_all(file, memoryview(header))

        def put(entry: Entry, value: Tensor) -> None:
            file.seek(starts[entry.name])
            _put(file, entry, value)

        yield put
        os.fsync(file.fileno())


def _put(file: FileIO, entry: Entry, value: Tensor) -> None:
    """The bytes of a tensor on any device, in the file's dtype, piece by piece."""
    assert tuple(value.shape) == entry.shape, (entry, value.shape)
    flat = value.detach().contiguous().view(-1)
    step = PIECE // max(value.itemsize, entry.dtype.itemsize)
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        cast = piece.to(device="cpu", dtype=entry.dtype)
        if cast.dtype != piece.dtype and not torch.equal(cast.isinf(), piece.isinf().cpu()):
            raise ValueError(
                f"dtype={entry.dtype} must hold the values of {entry.name}, got some beyond its range. "
                "Choose bfloat16 or float32."
            )
        write_all(file, bytes_of(cast))


def write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) or 0 :]


def _publish(
    outer: Path | None,
    target: Path,
    files: Mapping[str, list[Entry]],
    stem: str,
    finish: Callable[[Path], None],
) -> None:
    """On disk first, visible second: a crash leaves either nothing or everything at `target`."""
    if outer is None:
        return
    new = outer / "new"
    _write_index(files, new, stem=stem)
    finish(new)
    for file in [*(f for f in new.rglob("*") if f.suffix != ".safetensors"), new]:
        sync(file)
    os.rename(new, target)
    sync(target.parent)


def _write_index(files: Mapping[str, list[Entry]], directory: Path, *, stem: str) -> None:
    if len(files) == 1:
        return
    entries = [entry for group in files.values() for entry in group]
    metadata = {
        "total_parameters": sum(torch.Size(e.shape).numel() for e in entries),
        "total_size": sum(e.num_bytes for e in entries),
    }
    weight_map = {entry.name: file for file, group in files.items() for entry in group}
    write_json(directory / f"{stem}.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map})
