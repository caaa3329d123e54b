"""Attention kernels behind one interface (`usp.kernels.interface`), and the choice between them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from usp.kernels.cpu import CPU
from usp.kernels.cudnn import CUDNN
from usp.kernels.flash import FLASH
from usp.kernels.flash4 import FLASH4
from usp.kernels.interface import FEATURES, PACKED, SOFTCAP, V_SIZE, WINDOW, Kernel, Segments
from usp.kernels.padding import padded
from usp.kernels.tiled import TILED

__all__ = [
    "FEATURES",
    "KERNELS",
    "PACKED",
    "SOFTCAP",
    "V_SIZE",
    "WINDOW",
    "Kernel",
    "Segments",
    "capabilities",
    "choose",
]

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (FLASH4, CUDNN, FLASH, CPU, TILED)}
"""In order of preference. "reference", plain torch with any derivative, is no kernel of this interface."""
EVERY = """\
all: causal and bidirectional, kv heads that divide the query heads
all: sinks, joined to the result by log-sum-exp; not together with head_chunks"""
"""What needs no feature of a kernel."""


def choose(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    v_size: int,
    features: Iterable[str],
) -> Kernel:
    """The kernel called `name`, or for "auto" the first in KERNELS that takes the input.

    `size`: head size of q and k; `v_size`: of v; `features`: `usp.spans.features`. Head sizes that a kernel
    does not take are padded with zeros where that makes them ones that it takes. Raises ValueError for a
    name that is no kernel's and for a kernel that cannot take the input, saying what it does not take.
    """
    needed = frozenset(features) - {V_SIZE}  # sizes are looked at themselves

    def obstacles(kernel: Kernel) -> str:
        return _obstacles(kernel, device, dtype, size, v_size, needed)

    able = [kernel for kernel in KERNELS.values() if not obstacles(kernel)]
    for kernel in able:
        if name in ("auto", kernel.name):
            fitting = padded(kernel, size, v_size)
            assert fitting is not None
            return fitting
    choices = ", ".join([*(k.name for k in able), "reference", *(["auto"] if able else [])])
    if name not in KERNELS and name != "auto":
        raise ValueError(f"kernel={name!r} must be a kernel's name, and is not. Use one of: {choices}.")
    if name == "auto":
        what = f"{device.type} {dtype}"
        raise ValueError(f"kernel='auto' must find a kernel for {what}, and does not. Use one of: {choices}.")
    raise ValueError(
        f"kernel={name!r} must take {obstacles(KERNELS[name])}, and does not. Use one of: {choices}."
    )


def _obstacles(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    v_size: int,
    needed: frozenset[str],
) -> str:
    """What the kernel does not take of this, in words; empty: it takes all."""
    found = []
    if device.type not in kernel.devices:
        found.append(f"device {device.type}")
    elif not kernel.available(device):
        found.append(f"{device} as it is installed here")
    if dtype not in kernel.dtypes:
        found.append(str(dtype))
    found += [f"{f} ({text})" for f, text in FEATURES.items() if f in needed - kernel.features]
    if padded(kernel, size, v_size) is None:
        found.append(f"head size {size}" + (f" with {v_size} for v" if v_size != size else ""))
    return ", ".join(found)


def capabilities() -> str:
    """A table for people: kernel by device, types and features, in order of preference; then the features."""
    rows = [("kernel", "device", "types", *FEATURES)]
    for kernel in KERNELS.values():
        types = " ".join(str(dtype).removeprefix("torch.") for dtype in kernel.dtypes)
        marks = ("yes" if f in kernel.features else "padded" if f == V_SIZE else "no" for f in FEATURES)
        rows.append((kernel.name, " ".join(kernel.devices), types, *marks))
    rows.append(("reference", "any", "any", *("yes" for _ in FEATURES)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"{f}: {text}" for f, text in FEATURES.items()), *EVERY.splitlines()])
