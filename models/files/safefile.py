"""One safetensors file: its header checked to the byte, written as a stream, never mapped into memory.

Layout: 8 bytes, little-endian, the length of the header; the header, JSON: name -> dtype, shape and
data_offsets, counted from the header's end; the tensors, end to end. Reading and writing go piece by piece so
that memory does not grow with the file, which the library's writer and its mapped reader cannot promise.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BITS = {name: dtype.itemsize * 8 for name, dtype in DTYPES.items()} | {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_LONGEST_HEADER = 100_000_000  # the library's own limit
PIECE = 4 * 2**20  # bytes checked, cast or written at a time beside the tensor


class Damaged(ValueError):
    """What is wrong with a file, without its name."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor is and what its header says; `dtype` in safetensors' spelling, `start` in the file."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    num_bytes: int


def load_json(text: str | bytes) -> Any:
    """As json.loads, but a name that occurs twice in an object is a ValueError, and so is absurd nesting."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = sorted(name for name, count in counts.items() if count > 1)
            raise ValueError(f"it names {', '.join(twice)} twice")
        return out

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_header(root: Path, file: str) -> dict[str, Stored]:
    """Every tensor of root / file. Raises Damaged unless header and file agree to the byte."""
    with open(root / file, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise Damaged(f"its header of {length} bytes does not fit its {size} bytes")
        text = handle.read(length)
    try:
        header = load_json(text)
    except ValueError as error:
        raise Damaged(f"its header is no JSON: {error}") from None
    if not isinstance(header, dict) or not text.startswith(b"{"):
        raise Damaged("its header is no JSON object")
    _check_metadata(header.pop("__metadata__", {}))
    tensors = {name: _entry(file, name, entry, 8 + length) for name, entry in header.items()}
    _check_order(tensors, 8 + length, size)
    return tensors


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Damaged("its __metadata__ must hold texts only")


def _entry(file: str, name: str, entry: Any, base: int) -> Stored:
    def wrong(what: str) -> NoReturn:
        raise Damaged(f"tensor {name!r} {what}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        wrong("must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        wrong(f"has the unknown dtype {dtype!r}")
    for what, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 2**63 for n in value):
            wrong(f"has {what} {str(value)[:80]}, which are no sizes")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        wrong(f"has data_offsets {offsets}, which are no range")
    bits = prod(shape) * _BITS[dtype]
    if bits != (offsets[1] - offsets[0]) * 8:
        wrong(f"claims {offsets[1] - offsets[0]} bytes for shape {shape} of {dtype}")
    return Stored(file, tuple(shape), dtype, base + offsets[0], offsets[1] - offsets[0])


def _check_order(tensors: dict[str, Stored], start: int, size: int) -> None:
    """The tensors fill the file, without a gap and without sharing a byte."""
    end = start
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if stored.start != end:
            raise Damaged(f"tensor {name!r} starts at byte {stored.start} instead of {end}")
        end += stored.num_bytes
    if end != size:
        raise Damaged(f"its tensors end at byte {end} and the file at {size}")


def read_slice(path: Path, stored: Stored, slices: Sequence[slice]) -> Tensor:
    """That part of a tensor (start and stop for each dimension), in memory of its own."""
    out = torch.empty([s.stop - s.start for s in slices], dtype=DTYPES[stored.dtype])
    if not out.numel():
        return out
    view = bytes_of(out)
    done = 0
    with open(path, "rb", buffering=0) as file:
        for start, length in _runs(stored.shape, slices, out.itemsize):
            file.seek(stored.start + start)
            stop = done + length
            while done < stop:
                count = file.readinto(view[done : min(stop, done + PIECE)])
                if not count:
                    raise OSError(f"{path} ended {stop - done} bytes early: it changed since it was checked")
                done += count
    return out


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _runs(shape: Sequence[int], slices: Sequence[slice], itemsize: int) -> Iterator[tuple[int, int]]:
    """(start, length) in bytes of the consecutive pieces that make up a slice, in its order."""
    cut = [dim for dim, s in enumerate(slices) if (s.start, s.stop) != (0, shape[dim])]
    last = cut[-1] if cut else 0
    if not shape:
        yield 0, itemsize
        return
    strides = [prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    length = (slices[last].stop - slices[last].start) * strides[last]
    for index in product(*(range(s.start, s.stop) for s in slices[:last])):
        outer = sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield outer + slices[last].start * strides[last], length


def make_header(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The bytes in front of the tensors, and where in the file each one starts."""
    offset, entries, starts = 0, {}, {}
    for name, dtype, shape in sorted(tensors, key=lambda t: -t[1].itemsize):  # wide first: all are aligned
        end = offset + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        starts[name], offset = offset, end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {n: 8 + len(text) + start for n, start in starts.items()}
