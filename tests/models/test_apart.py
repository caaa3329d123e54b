"""A layer run again with attention kept: what sets out first, and that nobody reads what is on its way."""

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.batches import two_rows
from tests.models.test_options import CFG
from tests.pool import Pool, pool_of
from usp import shard_batch, value_and_grad
from usp.arena import Arena
from usp.mesh import TABLES, build_mesh
from usp.models import init, loss

VIEWS = {"view", "_unsafe_view", "split", "split_with_sizes", "transpose", "detach", "alias", "reshape"}
TOKENS = 2 * 12  # of one of two ranks, with padding
WHOSE = {TOKENS * CFG.num_heads * CFG.head_dim: "o", TOKENS * 100: "q, k, v"}  # with 2 times 2 kv heads
ranks = pool_of(2)


class Exchanges(TorchDispatchMode):
    """Starts and waits of all-to-alls, products between them; an error when what is on its way is read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.under_way: dict[int, str] = {}  # address of the memory -> whose

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        places = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}
        if name == "wait_tensor":
            for place in places & self.under_way.keys():
                self.seen.append(f"wait {self.under_way.pop(place)}")
        elif name not in VIEWS:
            assert not places & self.under_way.keys(), (name, self.under_way)
        out = func(*args, **(kwargs or {}))
        if namespace == "_c10d_functional" and name == "all_to_all_single":
            who = WHOSE[args[0].numel()]
            self.under_way[out.untyped_storage().data_ptr()] = who
            self.seen.append(f"start {who}")
        elif name in ("mm", "addmm") and self.seen[-1:] != ["product"]:
            self.seen.append("product")
        return out


def events(options: dict[str, Any]) -> list[str]:
    table, mesh = TABLES["ulysses"], build_mesh(ulysses=2)
    params = init(CFG, seed=1, dtype=torch.float64, table=table, mesh=mesh)
    shard = shard_batch(two_rows("packed"), table=table, mesh=mesh)
    if options.get("offload") == "host":
        options = {**options, "arena": Arena()}
    with Exchanges() as exchanges:
        value_and_grad(lambda p: loss(p, shard, CFG, table=table, mesh=mesh, **options))(params)
    assert not exchanges.under_way
    return exchanges.seen


P = "product"
FORWARD = ["start q, k, v", "wait q, k, v", "start o", "wait o", P]
# the result at once, before the projections; q, k, v are waited for behind the MLP
APART = ["start o", P, "start q, k, v", "wait o", P, "wait q, k, v", P]
BACKWARD = ["start o", "wait o", "start q, k, v", "wait q, k, v", P]


@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({"remat": "full"}, FORWARD),
        ({"remat": "attention"}, APART),
        ({"remat": "attention", "offload": "host"}, APART),
        ({"remat": "attention", "mlp_tile": 5}, APART),
    ],
    ids=["full", "attention", "offload", "tiles"],
)
def test_order(options: dict[str, Any], again: list[str], ranks: Pool) -> None:
    for seen in ranks.run(events, options):
        assert seen == [*(3 * FORWARD), *(3 * [*again, *BACKWARD])]
