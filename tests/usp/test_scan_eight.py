"""The scan's gathers and reduce-scatters on 8 ranks, over all three axes, against one process in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.models.batches import ONE, two_rows
from tests.ranks import run_ranks
from usp import reduce_grads, shard_batch, value_and_grad
from usp.arena import Arena
from usp.mesh import TABLES, P, Table, build_mesh, redistribute
from usp.models import LlamaConfig, abstract, init, loss, map_params, named_leaves, param_specs
from usp.zero1 import Zero1

# 9 query and 3 kv heads over 2 ranks, and leaves that 8 ranks cannot cut evenly
CFG = LlamaConfig(
    vocab_size=101, hidden_size=36, intermediate_size=52, num_layers=3, num_heads=9, num_kv_heads=3,
    head_dim=6, qkv_bias=True, qk_norm=True, init_std=0.2,
)  # fmt: skip
USP = TABLES["usp"]
WHOLE = replace(USP, rest=USP.use)
# float64 sums of the same terms in another order, up to 100 of mixed sign, relative to each leaf's largest
ROUNDING = 1e-12


class How(NamedTuple):
    zero: int
    remat: str
    group: int = 1
    offload: str = "none"


HOWS = [
    How(3, "full"),
    How(3, "attention", 2, "host"),
    How(1, "full", 1, "host"),
    How(1, "attention"),
    How(0, "full"),
    How(0, "attention", 1, "host"),
]


def run(how: How, mesh: Any, table: Table, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the whole batch, and every gradient as a whole."""
    specs: Any = param_specs(CFG, table)
    params = init(CFG, seed=1, dtype=torch.float64, table=table, mesh=mesh)
    shard = shard_batch(two_rows("packed"), table=table, mesh=mesh)
    options: Any = {"remat": how.remat, "group": how.group, "offload": how.offload, **more}
    if how.offload == "host":
        options["arena"] = Arena()
    value, grads = value_and_grad(lambda p: loss(p, shard, CFG, table=table, mesh=mesh, **options))(params)
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
    if how.zero == 1:
        zero1 = Zero1(specs, abstract(CFG), mesh)
        grads, specs = zero1.reduce_grads(grads), zero1.specs
    else:
        grads = reduce_grads(grads, specs, mesh)

    def whole(_: str, grad: Tensor, spec: P, leaf: Any) -> Tensor:
        return redistribute(grad, spec, P(*(None for _ in leaf.shape)), mesh, shape=leaf.shape).detach()

    return value, dict(named_leaves(map_params(whole, grads, specs, abstract(CFG))))


def every_way(rank: int, world: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    mesh = build_mesh(dp=2, ring=2, ulysses=2)
    found = [run(how, mesh, USP if how.zero == 3 else WHOLE) for how in HOWS]
    return [(value, grads if rank == 0 else {}) for value, grads in found]


@pytest.fixture(scope="module")
def results() -> list[list[tuple[Tensor, dict[str, Tensor]]]]:
    return run_ranks(every_way, 8, timeout=400)


@pytest.fixture(scope="module")
def want() -> tuple[Tensor, dict[str, Tensor]]:
    """One process, plain attention, nothing run again."""
    return run(How(0, "none"), ONE, WHOLE, kernel="reference")


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_eight_ranks_are_one(how: How, results: Any, want: tuple[Tensor, dict[str, Tensor]]) -> None:
    # cases H68, D1, D2, D5, D9, D13, D17, D58, P6, P9, P28, P29, P64, P68: every mode, packed, on three axes
    by_rank = [ways[HOWS.index(how)] for ways in results]
    assert all(torch.equal(value, by_rank[0][0]) for value, _ in by_rank)
    assert abs(by_rank[0][0] - want[0]) <= ROUNDING * want[0]
    grads = by_rank[0][1]
    assert grads.keys() == want[1].keys()
    for name, grad in want[1].items():
        assert grad.abs().max() > 0, name
        assert (grads[name] - grad).abs().max() <= ROUNDING * grad.abs().max(), name
