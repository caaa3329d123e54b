"""What a plan says is sent is what is sent: collectives and bytes, on every rank, forward and backward."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from tests.mesh.test_bundle import counts
from tests.models.batches import two_rows
from tests.models.plan.counted import counted, minus, no_grad
from tests.models.run_model import SCHEMES
from tests.pool import Pool
from usp import clip_by_global_norm, reduce_grads, shard_batch, value_and_grad
from usp.arena import Arena
from usp.mesh import TABLES, build_mesh, coordinates
from usp.models import LlamaConfig, init, loss, model_traffic, param_specs
from usp.models.plan.traffic_kinds import totals

CFG = LlamaConfig(
    vocab_size=101, hidden_size=60, intermediate_size=84, num_layers=3, num_heads=9, num_kv_heads=3,
    head_dim=10, qkv_bias=True, qk_norm=True,
)  # fmt: skip
EVEN = replace(CFG, num_heads=8, num_kv_heads=4, tie_embeddings=True, o_bias=True)
ONE_KV = replace(CFG, num_heads=8, num_kv_heads=1)  # a ring that gathers
SEQ = 23


class Case(NamedTuple):
    dp: int
    ring: int
    ulysses: int
    table: str
    cfg: LlamaConfig = CFG
    options: dict[str, Any] = {}  # noqa: RUF012


NARROW = {"dtype": torch.bfloat16}
CASES = {
    2: [
        *(Case(1, 1, 2, name, CFG, {"remat": "attention"}) for name in ("ulysses", "usp", "odysseus")),
        Case(1, 2, 1, "ring", CFG, {"remat": "attention"}),
        Case(1, 2, 1, "ring", ONE_KV, {"remat": "full", **NARROW}),
        Case(1, 1, 2, "replicated", EVEN, {"remat": "none"}),
        Case(1, 1, 2, "odysseus", EVEN, {"remat": "none", **NARROW}),
        Case(1, 1, 2, "ulysses", CFG, {"remat": "full", "head_chunks": 5}),
        Case(1, 2, 1, "ring", CFG, {"remat": "attention", "head_chunks": 2, "group": 2}),
        Case(1, 1, 2, "mine", EVEN, {"remat": "full", "mlp_tile": 5}),
    ],
    4: [
        Case(1, 1, 4, "ulysses", CFG, {"remat": "full", **NARROW}),
        Case(2, 1, 2, "ulysses", CFG, {"remat": "attention", "group": 2, "offload": "host"}),
        Case(1, 4, 1, "ring", CFG, {"remat": "attention"}),
        Case(2, 2, 1, "ring", ONE_KV, {"remat": "none"}),
        Case(1, 2, 2, "usp", CFG, {"remat": "attention", **NARROW}),
        Case(1, 2, 2, "usp", EVEN, {"remat": "full", "mlp_tile": 4}),
        Case(1, 2, 2, "usp", CFG, {"remat": "attention", "head_chunks": 3}),
        Case(1, 2, 2, "odysseus", EVEN, {"remat": "attention", **NARROW}),
        Case(2, 1, 2, "odysseus", EVEN, {"remat": "attention", "group": 3}),
        Case(1, 1, 4, "odysseus", CFG, {"remat": "full"}),
        Case(2, 1, 2, "replicated", CFG, {"remat": "full"}),
        Case(1, 1, 4, "ulysses", CFG, {"remat": "none", "head_chunks": 2}),
        Case(2, 1, 2, "mine", CFG, {"remat": "attention"}),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    made = {world: Pool(world) for world in CASES}
    yield made
    for pool in made.values():
        pool.stop()


def on_ranks(case: Case) -> None:
    table, options = SCHEMES[case.table], dict(case.options)
    mesh = build_mesh(dp=case.dp, ring=case.ring, ulysses=case.ulysses)
    cfg = case.cfg
    params = init(cfg, seed=1, table=table, mesh=mesh)
    shard = shard_batch(two_rows("whole rows"), table=table, mesh=mesh)
    if options.get("offload") == "host":
        options["arena"] = Arena()

    def objective(p: Any) -> torch.Tensor:
        return loss(p, shard, cfg, table=table, mesh=mesh, **options)

    sizes, at = {"dp": case.dp, "ring": case.ring, "ulysses": case.ulysses}, coordinates(mesh)
    said = model_traffic(cfg, table, sizes, batch=2, seq_len=SEQ, at=at, **options)
    forward = counted(lambda: no_grad(lambda: objective(params)))
    assert totals(said.forward) == forward, "forward"
    found: list[Any] = []
    with CommDebugMode() as mode:
        both = counted(lambda: found.append(value_and_grad(objective)(params)[1]))
    assert totals(said.backward) == minus(both, forward), "backward"
    assert counts(mode) == {kind: count for kind, (count, _) in both.items()}
    specs = param_specs(cfg, table)

    def update() -> None:
        clip_by_global_norm(reduce_grads(found[0], specs, mesh), specs, mesh, 1.0)

    assert totals(said.update) == counted(update), "update"


@pytest.mark.parametrize(
    ("world", "case"), [(w, c) for w, cases in CASES.items() for c in cases], ids=lambda v: str(v)[:60]
)
def test_every_collective_and_byte(world: int, case: Case, pools: dict[int, Pool]) -> None:
    pools[world].run(on_ranks, case)


def test_ranks_send_alike_where_heads_divide() -> None:
    cfg = replace(CFG, num_heads=8, num_kv_heads=4, vocab_size=104, hidden_size=64, intermediate_size=88)
    sizes = {"dp": 1, "ring": 2, "ulysses": 4}
    for name, table in TABLES.items():
        all_sent = set()
        for ring in range(2):
            for ulysses in range(4):
                at = {"dp": 0, "ring": ring, "ulysses": ulysses}
                said = model_traffic(cfg, table, sizes, batch=1, seq_len=SEQ, at=at)
                all_sent.add((said.forward, said.backward))
        assert len(all_sent) == 1, name
