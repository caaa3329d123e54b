"""What must be the same: on every rank of a run, and in a run and the one that goes on from it."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from usp.tools import text
from usp.tools.config import Train
from usp.tools.ranks import Ranks

FILE = "config.json"
WHOLE = 2**26  # bytes of a file of weights that is looked at as a whole
BLOCKS, BLOCK, PART = 2048, 2**14, 2**20  # of a larger one: so many blocks of so many bytes, start and end
PER_RANK = ("model", "data")  # paths, which may differ between machines; what is in them may not
SAME_RUN = ("seq_len", "lr", "warmup", "weight_decay", "max_norm", "seed")
Facts = dict[str, Any]


def options(cfg: Train) -> Facts:
    """The command line, as far as all ranks must have the same one, and the version of torch."""
    values = {name: value for name, value in dataclasses.asdict(cfg).items() if name not in PER_RANK}
    return {**{name: str(value) for name, value in values.items()}, "torch": torch.__version__}


def content(cfg: Train, data: text.Packed) -> Facts:
    """Short digests of the model directory and of the token ids of the data."""
    tokens = hashlib.sha256()
    for doc in data.docs:
        tokens.update(len(doc).to_bytes(8, "little"))
        tokens.update(doc.tobytes())
    return {"model": _digest(cfg.model), "data": tokens.hexdigest()[:16]}


def _digest(folder: Path) -> str:
    """Of config.json, the index and every file of weights up to `WHOLE` bytes as a whole.

    Of a larger file name, size, start, end and `BLOCKS` evenly spaced blocks, so that it takes no longer than
    a small one. That misses a change which lies between two blocks: shorter than size / `BLOCKS`, 2.4 MB of
    5 GB, such as that of a norm or of some rows of a matrix.
    """
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        whole = path.name == FILE or path.name.endswith(".index.json")
        if not whole and path.suffix != ".safetensors":
            continue
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            if whole or size <= WHOLE:
                while part := file.read(PART):
                    found.update(part)
                continue
            for start, length in _blocks(size):
                file.seek(start)
                found.update(file.read(length))
    return found.hexdigest()[:16]


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    """Start and length of what is read of a large file."""
    yield 0, PART  # names, shapes and the first tensors
    for index in range(BLOCKS):
        yield PART + index * (size - 2 * PART - BLOCK) // (BLOCKS - 1), BLOCK
    yield size - PART, PART


def same_everywhere(ranks: Ranks, mine: Facts) -> None:
    """End the run, naming the ranks, unless every rank has the same facts. One exchange of short strings."""
    everyone = ranks.exchange(mine)
    ranks.checked(lambda: _compare(everyone))


def _compare(everyone: list[Facts]) -> None:
    """Against what most ranks have; of two ranks, against the first."""
    for name in everyone[0]:
        values = [facts[name] for facts in everyone]
        usual = max(values, key=values.count)
        other = {rank: value for rank, value in enumerate(values) if value != usual}
        if other:
            got = ", ".join(f"{value} on rank {rank}" for rank, value in other.items())
            raise ValueError(
                f"{name}={usual} must be the same on every rank, got {got}. Start all with the same options "
                "and files."
            )


def run_facts(cfg: Train, *, dtype: torch.dtype, num_rows: int, found: Mapping[str, Any]) -> Facts:
    """What decides the numbers of a run, the mesh and what only saves memory left out."""
    same = {name: getattr(cfg, name) for name in SAME_RUN}
    return {**same, "batch_size": num_rows, "dtype": str(dtype).removeprefix("torch."), **found}


def check_same_run(out: Path, facts: Facts) -> bool:
    """Whether `out` holds a run. ValueError, naming all that differs, when it is another one."""
    file = out / FILE
    if not file.exists():
        return False
    try:
        before = json.loads(file.read_text(encoding="utf-8"))["facts"]
        differing = {name: before.get(name) for name in facts if before.get(name) != facts[name]}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"out={out} must hold a run to resume it, got an unreadable {FILE}. Change --out."
        ) from None
    if differing:
        name, *_ = differing
        got = ", ".join(f"{name}={value}" for name, value in differing.items())
        raise ValueError(
            f"{name}={facts[name]} must be that of the run that is resumed, got {got} in out={out}. Give the "
            "options and files of that run, or another --out."
        )
    return True


def write_facts(cfg: Train, facts: Facts) -> None:
    """OUT/config.json: every option, and the facts beside them; there as a whole or not at all."""
    cfg.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**dataclasses.asdict(cfg), "facts": facts}, default=str, indent=2) + "\n"
    fresh = cfg.out / f".{FILE}.tmp"
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, cfg.out / FILE)
