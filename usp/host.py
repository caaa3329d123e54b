"""The host's memory: what bounds it, how much of it is left, and copies from it that nobody waits for."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Room(NamedTuple):
    """Memory shared by all processes that name it alike, and how many bytes of it are left."""

    name: str
    free: int


def sent(t: Tensor, device: torch.device) -> Tensor:
    """`t` on `device`. The host does not wait: to a GPU it goes by way of page-locked memory."""
    if device.type == "cuda" and t.device.type == "cpu":
        t = t.pin_memory()
    return t.to(device, non_blocking=True)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Host memory that can still be used: the least that is left of any room, None if unknown."""
    return min((room.free for room in rooms(root)), default=None)


def rooms(root: Path = Path("/")) -> list[Room]:
    """What bounds this process: the machine's memory, and each control group's above it that has a limit.

    Processes of one machine share the first, whatever containers they are in, those of one group its limit.
    Of what a group uses, files that were read and may be dropped count as free, as they do in MemAvailable.
    """
    try:
        machine = (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        machine = socket.gethostname()
    found = []
    memory = _fields(root / "proc/meminfo").get("MemAvailable:")
    if memory is not None:
        found.append(Room(f"{machine} memory", memory * 1024))
    for kind, folder in _groups(root):
        free = _left(folder)
        if free is not None:
            found.append(Room(f"{machine} group {kind}{folder.stat().st_ino}", max(free, 0)))
    return found


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Folders of this process's control groups, from its own up to the root that it sees; both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    paths = {"": "/", "memory": "/"}
    for line in lines:
        _, kinds, path = line.split(":", 2)
        for kind in kinds.split(","):
            paths[kind] = path
    for kind in ("", "memory"):
        base = root / "sys/fs/cgroup" / kind
        own = base / paths[kind].lstrip("/")
        if ".." in paths[kind] or not own.is_dir():  # of another namespace: only the base is to be seen
            own = base
        while own != base:
            yield kind, own
            own = own.parent
        yield kind, base


def _left(folder: Path) -> int | None:
    """Bytes below the limit of one group; None: it has none, or cannot be read."""
    for limit, used, idle in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, now = (int((folder / name).read_text(encoding="ascii")) for name in (limit, used))
        except (OSError, ValueError):  # not there, or "max"
            continue
        return most - now + _fields(folder / "memory.stat").get(idle, 0)
    return None


def _fields(file: Path) -> dict[str, int]:
    """Names and numbers of a file with one of each a line."""
    try:
        lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
