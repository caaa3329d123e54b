"""What a ring sends is on its way while attention is computed, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.mesh.cases import mesh_of
from tests.pool import Pool
from tests.usp.rings import Case, Place, inputs
from usp import attention

SENT = ("all_to_all_single", "all_gather_into_tensor_out", "reduce_scatter_tensor")


class Steps(TorchDispatchMode):
    """Kernels, what is sent and what is waited for, in order; what lasts over several calls is said once.

    Keys and values travel in bfloat16 here, gradients in float32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.under_way: dict[int, str] = {}  # address -> what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        said = "kernel" if "flash_attention_for_cpu" in name else ""
        if namespace == "_c10d_functional":
            tensor: Tensor = pytree.tree_leaves(out)[0]
            what = "keys" if tensor.dtype == torch.bfloat16 else "gradients"
            if name in SENT:
                self.under_way[tensor.data_ptr()] = what
                said = f"send {what}"
            elif name == "wait_tensor":
                said = f"wait {self.under_way.pop(args[0].data_ptr())}"
        if said and said not in self.seen[-1:]:
            self.seen.append(said)
        return out


def order(exchange: str) -> tuple[list[str], list[str], int]:
    place = Place("ring", mesh_of((1, 4, 1)))
    x, up = inputs(Case((1, 32, 4, 2, 8, 8)))
    local = [place.tokens(t).bfloat16().requires_grad_() for t in x]
    with Steps() as forward:
        out = attention(*local, table=place.table, mesh=place.mesh, exchange=exchange)  # type: ignore[arg-type]
    with Steps() as backward:
        torch.autograd.grad(out, local, place.tokens(up).bfloat16())
    return forward.seen, backward.seen, len(forward.under_way) + len(backward.under_way)


KEYS = ["send keys", "kernel", "wait keys"]
TURN = ["send keys", "kernel", "wait gradients", "send gradients", "wait keys"]
FORWARD = {"p2p": [*KEYS, *KEYS, *KEYS, "kernel"], "gather": [*KEYS, "kernel"]}
BACKWARD = {
    # a step's gradients set out after its kernel and are waited for after the next one's
    "p2p": [
        "send keys", "kernel", "send gradients", "wait keys", *TURN, *TURN,
        "kernel", "wait gradients", "send gradients", "wait gradients",
    ],
    "gather": [*KEYS, "kernel", "send gradients", "wait gradients"],
}  # fmt: skip


@pytest.mark.parametrize("exchange", ["p2p", "gather"])
def test_sent_before_the_kernel_and_waited_for_after_it(exchange: str, ranks: Pool) -> None:
    for forward, backward, left in ranks.run(order, exchange):
        assert forward == FORWARD[exchange]
        assert backward == BACKWARD[exchange]
        assert left == 0
