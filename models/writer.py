"""Writing a directory of safetensors files: planned first, streamed, and visible only when complete."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from usp.models.params import Mesh

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


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
    """Bytes in 5_000_000, "5MB", "5GB" (powers of ten) or "5GiB"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", str(size).strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    count = int(float(match[1]) * unit) if match and unit else 0
    if count < 1:
        raise ValueError(
            f'max_shard_size={size!r} must be a positive size, got no number of bytes. Write "5GB".'
        )
    return count


def is_lead(mesh: Mesh | None) -> bool:
    """Whether this process writes: rank 0, or the only one."""
    return not isinstance(mesh, DeviceMesh) or dist.get_rank() == 0


@contextmanager
def together(mesh: Mesh | None) -> Iterator[None]:
    """An exception inside the block on any rank is raised on every rank. One small collective at the end."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if isinstance(mesh, DeviceMesh) and mesh.size() > 1:
        reports: list[tuple[str, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, failure and (_kind(failure), str(failure)))
        if failure is None:
            for rank, report in enumerate(reports):
                if report is not None:
                    kinds = {"ValueError": ValueError, "OSError": OSError}
                    raise kinds.get(report[0], RuntimeError)(f"rank {rank}: {report[1]}")
    if failure is not None:
        raise failure


def _kind(error: Exception) -> str:
    return "ValueError" if isinstance(error, ValueError) else "OSError" if isinstance(error, OSError) else ""


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
    produce: Callable[[str], Tensor],
    *,
    stem: str,
    max_shard_size: int | str,
    mesh: Mesh | None,
    finish: Callable[[Path], None],
) -> None:
    """Write `entries` as safetensors, then `finish(directory)` for the other files, then rename into place.

    Every rank calls this; `produce(name)` is called on every rank in the same order and may communicate.
    Rank 0 writes and holds the tensors of one file at a time. Raises on every rank: ValueError when the
    target exists and is not an empty directory, OSError when writing fails; nothing is left behind.
    """
    target = Path(path).absolute()
    files = plan_files(entries, stem=stem, max_bytes=parse_size(max_shard_size))
    scratch = target.parent / f".{target.name}.tmp-{os.getpid()}"
    lead = is_lead(mesh)
    with together(mesh):
        if lead:
            _check_target(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch.mkdir()
    try:
        _stream(files, produce, scratch if lead else None, mesh=mesh)
        with together(mesh):
            if lead:
                _write_index(files, scratch, stem=stem)
                finish(scratch)
                _publish(scratch, target)
    finally:
        if lead:
            shutil.rmtree(scratch, ignore_errors=True)


def _stream(
    files: dict[str, list[Entry]],
    produce: Callable[[str], Tensor],
    scratch: Path | None,
    *,
    mesh: Mesh | None,
) -> None:
    """All ranks produce; rank 0 (`scratch` given) keeps and saves. Its failure is told after each file."""
    for file, group in files.items():
        held: dict[str, Tensor] = {}
        failure: Exception | None = None
        for entry in group:
            value = produce(entry.name)  # may communicate: never skipped on one rank alone
            try:
                if scratch is not None and failure is None:
                    held[entry.name] = _own(value, entry)
            except Exception as error:  # told below, where every rank hears of it
                failure = error
            del value
        with together(mesh):
            if failure is not None:
                raise failure
            if scratch is not None:
                save_file(held, scratch / file, metadata={"format": "pt"})


def _own(value: Tensor, entry: Entry) -> Tensor:
    """A contiguous CPU tensor in the file's dtype that shares its memory with no other one."""
    assert tuple(value.shape) == entry.shape, (entry, value.shape)
    out = value.detach().to(device="cpu", dtype=entry.dtype).contiguous()
    alone = out.untyped_storage().nbytes() == entry.num_bytes
    return out if alone and out.data_ptr() != value.data_ptr() else out.clone()


def _check_target(target: Path) -> None:
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise ValueError(
            f"path={str(target)!r} must not exist or be an empty directory, got something there. "
            "Choose another path or remove it."
        )


def _write_index(files: dict[str, list[Entry]], scratch: Path, *, stem: str) -> None:
    if len(files) == 1:
        return
    entries = [entry for group in files.values() for entry in group]
    metadata = {
        "total_parameters": sum(torch.Size(e.shape).numel() for e in entries),
        "total_size": sum(e.num_bytes for e in entries),
    }
    weight_map = {entry.name: file for file, group in files.items() for entry in group}
    write_json(scratch / f"{stem}.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map})


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _publish(scratch: Path, target: Path) -> None:
    """On disk first, visible second: a crash leaves either nothing or everything at `target`."""
    for file in [*(f for f in scratch.rglob("*") if f.is_file()), scratch]:
        _sync(file)
    os.rename(scratch, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
