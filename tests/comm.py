"""Collectives, counted by PyTorch's own observer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch.distributed.tensor.debug import CommDebugMode

UNSAFE = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class Comm(CommDebugMode):
    """Also gathers on the CPU: their operator, the one with `out`, is missing from the list it goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.comm_registry.add(torch.ops._c10d_functional.all_gather_into_tensor_out)

    def kinds(self) -> dict[str, int]:
        """By the names of `usp.mesh.plan`'s steps. None may be one that gloo is not safe with."""
        found: Counter[str] = Counter()
        for op, n in self.get_comm_counts().items():
            name = str(op).rpartition(".")[2]
            assert name not in UNSAFE or not n, f"{name} on the CPU: see usp.mesh.collectives.gather"
            found[next((kind for kind in KINDS if name.startswith(kind)), name)] += n
        return {kind: n for kind, n in found.items() if n}


def counted(fn: Callable[[], object]) -> dict[str, int]:
    with Comm() as comm:
        fn()
    return comm.kinds()
