"""Collectives and the bytes that leave a rank, counted where torch dispatches them."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "all_to_all_single": "all_to_all",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_reduce": "all_reduce",
}


class Counted(TorchDispatchMode):
    """`seen`: kind -> collectives and bytes sent by this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = str(func).split(".")
        if packet[0] == "_c10d_functional" and packet[1] in KINDS:
            count, nbytes = self.seen.get(KINDS[packet[1]], (0, 0))
            self.seen[KINDS[packet[1]]] = (count + 1, nbytes + sent(packet[1], *args))
        return func(*args, **(kwargs or {}))


def sent(name: str, x: Tensor | list[Tensor], *args: Any) -> int:
    if isinstance(x, list):  # several tensors in one collective
        return sum(sent(name.removesuffix("_coalesced"), t, *args) for t in x)
    group: Any = _resolve_process_group(args[-1])
    parts, nbytes = group.size(), x.numel() * x.element_size()
    if name == "all_to_all_single":
        row = prod(x.shape[1:]) * x.element_size()
        return sum(n for i, n in enumerate(args[1]) if i != group.rank()) * row
    if name == "all_gather_into_tensor_out":
        return nbytes * (parts - 1)
    times = 2 if name == "all_reduce" else 1
    return -(-times * nbytes * (parts - 1) // parts)


def counted(fn: Any) -> dict[str, tuple[int, int]]:
    with Counted() as mode:
        fn()
    return {kind: found for kind, found in mode.seen.items() if found[0]}


def minus(whole: dict[str, tuple[int, int]], part: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    left = {k: (n - part.get(k, (0, 0))[0], b - part.get(k, (0, 0))[1]) for k, (n, b) in whole.items()}
    return {kind: found for kind, found in left.items() if found != (0, 0)}


def no_grad(fn: Any) -> Any:
    with torch.no_grad():
        return fn()
