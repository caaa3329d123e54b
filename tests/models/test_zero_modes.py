"""ZeRO-0, ZeRO-1 and ZeRO-3 are placements: loss, norm and every parameter are one process' in each."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm import Comm
from tests.models.batches import ONE, two_rows
from tests.models.test_options import CFG
from tests.pool import Pool, pool_of
from usp import adamw_init, adamw_update, clip_by_global_norm, reduce_grads, shard_batch, value_and_grad
from usp.mesh import TABLES, P, build_mesh, redistribute
from usp.models import abstract, init, loss, map_params, named_leaves, param_specs
from usp.zero1 import Zero1

ZERO3 = TABLES["ulysses"]
ZERO0 = replace(ZERO3, rest=ZERO3.use)
# Parameters cut over one axis, copied over the other: the optimizer adds the other.
MIXED = replace(ZERO3, rest={name: P("ulysses", *spec.dims[1:]) for name, spec in ZERO3.use.items()})
MODES = {"zero3": (ZERO3, False), "zero0": (ZERO0, False), "zero1": (ZERO0, True), "mixed": (MIXED, True)}
MAX_NORM, LR, DECAY = 0.5, 0.01, 0.1


def train(mode: str, mesh: Any) -> list[Any]:
    """Three steps: each one's loss and norm before clipping, and the parameters at the end."""
    table, sharded = MODES[mode]
    specs = param_specs(CFG, table)
    params = init(CFG, seed=1, dtype=torch.float64, table=table, mesh=mesh)
    zero1 = Zero1(specs, abstract(CFG), mesh) if sharded else None
    state = adamw_init(params if zero1 is None else zero1.slices(params))
    out: list[Any] = []
    for case in ("packed", "whole rows", "packed"):
        shard = shard_batch(two_rows(case), table=table, mesh=mesh)

        def objective(p: Any, shard: Any = shard) -> Any:
            return loss(p, shard, CFG, table=table, mesh=mesh, remat="full")

        value, grads = value_and_grad(objective)(params)
        if zero1 is None:
            grads, norm = clip_by_global_norm(reduce_grads(grads, specs, mesh), specs, mesh, MAX_NORM)
            with Comm() as comm:
                params, state = adamw_update(params, grads, state, lr=LR, weight_decay=DECAY)
            assert comm.kinds() == {}  # case P17: on local shards
        else:
            grads, norm = clip_by_global_norm(zero1.reduce_grads(grads), zero1.specs, mesh, MAX_NORM)
            with Comm() as comm:
                params, state = zero1.update(params, grads, state, lr=LR, weight_decay=DECAY)
            if dist.is_initialized():
                copies = mode == "zero1" or mesh.size(0) > 1
                assert comm.kinds() == ({"all_gather": 1} if copies else {})
        value = value.clone()
        if dist.is_initialized():
            dist.all_reduce(value)
        out += [value, norm]

    def whole(_: str, p: Any, spec: P, leaf: Any) -> Any:
        return redistribute(p, spec, P(*(None for _ in leaf.shape)), mesh, shape=leaf.shape)

    full = map_params(whole, params, specs, abstract(CFG))
    return [*out, *(t for _, t in named_leaves(full))]


def state_is_cut() -> None:
    mesh = build_mesh(dp=2, ulysses=2)
    params = init(CFG, seed=1, table=ZERO0, mesh=mesh)
    own = adamw_init(Zero1(param_specs(CFG, ZERO0), abstract(CFG), mesh).slices(params)).exp_avg
    held = sum(t.numel() for _, t in named_leaves(own))
    total = sum(t.numel() for _, t in named_leaves(params))
    assert held <= total / 4 + total / 20  # a quarter, and what does not divide


ranks = pool_of(4)


def on_ranks(mode: str, dp: int, ulysses: int) -> list[Any]:
    return train(mode, build_mesh(dp=dp, ulysses=ulysses))


@pytest.mark.parametrize(("dp", "ulysses"), [(2, 2), (1, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode: str, dp: int, ulysses: int, ranks: Pool) -> None:
    # cases D1, D2, D17, H8, H10: no factor of any number of ranks anywhere, in the norm as in the gradients
    want = train("zero0", ONE)
    # float64 sums in another order, about 1e-15 of the largest; Adam divides each entry of a gradient by
    # its own size, which for entries 1e4 times smaller than the largest leaves 1e-11
    for results in ranks.run(on_ranks, mode, dp, ulysses):
        for got, one in zip(results, want, strict=True):
            assert (got - one).abs().max() <= 1e-9 * one.abs().max()


def test_a_quarter_of_the_state(ranks: Pool) -> None:
    ranks.run(state_is_cut)
