"""What a plan says is sent is what is sent: collectives and bytes, on every rank, forward and backward."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from tests.comm import Comm
from tests.models.batches import two_rows
from tests.models.plan.counted import counted, minus, no_grad
from tests.pool import Pool
from tests.schemes import SCHEMES
from usp import clip_by_global_norm, reduce_grads, shard_batch, value_and_grad
from usp.arena import Arena
from usp.mesh import TABLES, build_mesh, coordinates
from usp.models import LlamaConfig, init, loss, model_traffic, param_specs
from usp.models.plan.local import local
from usp.models.plan.textbook import textbook
from usp.models.plan.traffic_kinds import totals

CFG = LlamaConfig(
    vocab_size=101, hidden_size=60, intermediate_size=84, num_layers=3, num_heads=9, num_kv_heads=3,
    head_dim=10, qkv_bias=True, qk_norm=True,
)  # fmt: skip
EVEN = replace(CFG, num_heads=8, num_kv_heads=4, tie_embeddings=True, o_bias=True)
ONE_KV = replace(CFG, num_heads=8, num_kv_heads=1)  # a ring that gathers
EQUAL = replace(EVEN, hidden_size=64, intermediate_size=88, num_kv_heads=8, head_dim=12)  # all divide by 4
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
        Case(1, 2, 2, "usp", ONE_KV, {"remat": "full", "head_chunks": 2}),  # gathers
        Case(1, 2, 2, "usp", ONE_KV, {"remat": "full", "head_chunks": 4}),  # does not
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
    with Comm() as mode:
        both = counted(lambda: found.append(value_and_grad(objective)(params)[1]))
    assert totals(said.backward) == minus(both, forward), "backward"
    assert mode.kinds() == {kind: count for kind, (count, _) in both.items()}
    specs = param_specs(cfg, table)

    def update() -> None:
        clip_by_global_norm(reduce_grads(found[0], specs, mesh), specs, mesh, 1.0)

    assert totals(said.update) == counted(update), "update"


@pytest.mark.parametrize(
    ("world", "case"), [(w, c) for w, cases in CASES.items() for c in cases], ids=lambda v: str(v)[:60]
)
def test_every_collective_and_byte(world: int, case: Case, pools: dict[int, Pool]) -> None:
    pools[world].run(on_ranks, case)


BOOK = {
    "ulysses": Case(1, 1, 4, "ulysses", EQUAL),
    "ulysses and rows": Case(2, 1, 2, "ulysses", EQUAL),
    "ring": Case(1, 4, 1, "ring", EQUAL),
    "ring that gathers": Case(2, 2, 1, "ring", replace(EQUAL, num_kv_heads=1)),
    "usp": Case(1, 2, 2, "usp", EQUAL),
    "usp of fewer kv heads": Case(1, 2, 2, "usp", replace(EQUAL, num_kv_heads=4)),
    "odysseus": Case(1, 2, 2, "odysseus", EQUAL),
    "odysseus and rows": Case(2, 1, 2, "odysseus", EQUAL),
    "replicated": Case(2, 1, 2, "replicated", EQUAL),
    "tp_sp": Case(1, 1, 4, "tp_sp", EQUAL),
}


def one_layer(case: Case, cfg: LlamaConfig) -> list[dict[str, tuple[int, int]]]:
    """What a rank sends for one layer, forward and backward: that of three layers without that of two."""
    table, mesh = SCHEMES[case.table], build_mesh(dp=case.dp, ring=case.ring, ulysses=case.ulysses)
    shard = shard_batch(two_rows("whole rows"), table=table, mesh=mesh)
    found = []
    for num in (3, 2):
        params = init(replace(cfg, num_layers=num), seed=1, table=table, mesh=mesh)

        def objective(p: Any, num: int = num) -> torch.Tensor:
            own = replace(cfg, num_layers=num)
            return loss(p, shard, own, table=table, mesh=mesh, remat="none", dtype=torch.bfloat16)

        forward = counted(lambda f=objective, p=params: no_grad(lambda: f(p)))
        both = counted(lambda f=objective, p=params: value_and_grad(f)(p))
        found.append((forward, minus(both, forward)))
    return [minus(three, two) for three, two in zip(*found, strict=True)]


def by_the_book(case: Case) -> None:
    sizes = {"dp": case.dp, "ring": case.ring, "ulysses": case.ulysses}
    book = textbook(local(case.cfg, SCHEMES[case.table], sizes, batch=2, seq_len=SEQ), torch.bfloat16)
    assert bool(book) == (case.table != "replicated")
    sent = [sum(nbytes for _, nbytes in way.values()) for way in one_layer(case, case.cfg)]
    assert sent == [sum(f.forward for f in book), sum(f.backward for f in book)], book


@pytest.mark.parametrize("name", BOOK)
def test_a_layer_sends_what_the_papers_say(name: str, pools: dict[int, Pool]) -> None:
    """Exactly, where heads, features and tokens divide."""
    pools[4].run(by_the_book, BOOK[name])


def test_every_table_is_in_the_book() -> None:
    assert {case.table for case in BOOK.values()} == {*TABLES, "tp_sp"}


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
