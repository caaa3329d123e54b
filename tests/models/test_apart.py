"""A layer run again with attention kept: what sets out first, and that nobody reads what is on its way."""

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.batches import tokens_of
from tests.models.test_options import CFG
from tests.pool import Pool, pool_of
from usp import Batch, shard_batch, value_and_grad
from usp.arena import Arena
from usp.mesh import TABLES, build_mesh
from usp.models import init, loss, map_params, named_leaves

VIEWS = {"view", "_unsafe_view", "split", "split_with_sizes", "transpose", "detach", "alias", "reshape"}
WIDTHS = {CFG.num_heads * CFG.head_dim: "o", (CFG.num_heads + 2 * CFG.num_kv_heads) * CFG.head_dim: "q, k, v"}
ranks = pool_of(2)


class Exchanges(TorchDispatchMode):
    """Starts and waits of all-to-alls, products of runs with a graph; an error when what travels is read."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens  # of one rank
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
            who = WIDTHS[args[0].numel() // self.tokens]
            self.under_way[out.untyped_storage().data_ptr()] = who
            self.seen.append(f"start {who}")
        elif torch.is_grad_enabled() and "mm" in name and self.seen[-1:] != ["product"]:
            self.seen.append("product")
        return out


def problem(rows: int, **options: Any) -> tuple[Any, Any]:
    """The loss of so many rows of 23 tokens as a function of the parameters, and these."""
    table, mesh = TABLES["ulysses"], build_mesh(ulysses=2)
    params = init(CFG, seed=1, dtype=torch.float64, table=table, mesh=mesh)
    shard = shard_batch(Batch(tokens_of(rows, 23)), table=table, mesh=mesh)
    if options.get("offload") == "host":
        options["arena"] = Arena()
    return lambda p: loss(p, shard, CFG, table=table, mesh=mesh, **options), params


def events(rows: int, options: dict[str, Any]) -> list[str]:
    fn, params = problem(rows, **options)
    with Exchanges(rows * 12) as exchanges:
        value_and_grad(fn)(params)
    assert not exchanges.under_way
    return exchanges.seen


def with_hooks(inside: bool) -> float:
    """Largest change of a gradient, relative, by hooks that copy what autograd saves, late on one rank."""
    fn, params = problem(1, remat="attention")

    def pack(t: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            time.sleep(0.01)
        return t.detach().clone()

    def grads(hooked: bool) -> list[Tensor]:
        leaves = map_params(lambda _, t: t.detach().clone().requires_grad_(), params)
        flat = [t for _, t in named_leaves(leaves)]
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with hooks if hooked else nullcontext():
            value = fn(leaves)
            if inside:
                return list(torch.autograd.grad(value, flat))
        return list(torch.autograd.grad(value, flat))

    pairs = zip(grads(True), grads(False), strict=True)
    return max(float((got - want).abs().max() / want.abs().max()) for got, want in pairs)


P = "product"
FORWARD = ["start q, k, v", "wait q, k, v", "start o", "wait o"]
# the result at once, before the projections; q, k, v are waited for behind the MLP
APART = ["start o", P, "start q, k, v", "wait o", P, "wait q, k, v"]
TILES = ["start o", P, "start q, k, v", "wait o", "wait q, k, v", P]  # the MLP runs in its gradient
BACKWARD = ["start o", "wait o", "start q, k, v", "wait q, k, v"]


LATE = [P, "start q, k, v", "start o", "wait o", P, "wait q, k, v"]


@pytest.mark.parametrize(
    ("options", "rows", "again"),
    [
        ({"remat": "full"}, 1, [P, *FORWARD, P]),
        ({"remat": "attention"}, 1, APART),
        ({"remat": "attention", "mlp_tile": 5}, 1, TILES),
        ({"remat": "attention"}, 2, LATE),  # rows lie another way than they are sent: a copy
    ],
    ids=["full", "attention", "tiles", "two rows"],
)
def test_order(options: dict[str, Any], rows: int, again: list[str], ranks: Pool) -> None:
    for seen in ranks.run(events, rows, options):
        assert seen == [*(3 * FORWARD), *(3 * [*again, *BACKWARD])]


def test_order_from_the_host(ranks: Pool) -> None:
    """The last layer's is here; what comes from the host is not waited for before it must be."""
    for seen in ranks.run(events, 1, {"remat": "attention", "offload": "host"}):
        assert seen == [*(3 * FORWARD), *APART, *BACKWARD, *(2 * [*LATE, *BACKWARD])]


@pytest.mark.parametrize("inside", [False, True])
def test_hooks_on_what_is_saved(inside: bool, ranks: Pool) -> None:
    """As of trainers that move activations to the host: they read what is saved when it is saved."""
    assert ranks.run(with_hooks, inside) == [0.0, 0.0]
