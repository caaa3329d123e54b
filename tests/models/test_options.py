"""Options change what is kept, moved and run again, never the loss or a gradient."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.comm import Comm
from tests.models.batches import ONE, SEQ, TABLE, two_rows
from tests.pool import Pool, pool_of
from usp import Batch, reduce_grads, shard_batch, value_and_grad
from usp.arena import Arena
from usp.mesh import TABLES, P, build_mesh, redistribute
from usp.models import LlamaConfig, abstract, init, loss, map_params, named_leaves, param_specs

CFG = LlamaConfig(
    vocab_size=101,
    hidden_size=60,
    intermediate_size=84,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    qkv_bias=True,
    init_std=0.1,
)


def odd(field: str, value: int) -> Batch:
    """A batch with one id that no model of this vocabulary has, in its last place."""
    batch = two_rows("whole rows")
    ids = getattr(batch, field).clone()
    ids[1, -1] = value
    return batch._replace(**{field: ids})


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"remat": "full"},
    "attention": {"remat": "attention"},
    "attention, groups": {"remat": "attention", "group": 2},
    "offloaded": {"remat": "attention", "offload": "host"},
    "tiles": {"remat": "none", "mlp_tile": 5},
    "everything": {"remat": "attention", "group": 2, "offload": "host", "mlp_tile": 5},
}
# float64: tiles add the same terms in another order, a few units of 2e-16 of the largest entry; the rest is
# the same to the last bit
ROUNDING = 1e-13


ranks = pool_of(4)


def step(params: Any, mesh: Any, table: Any, **options: Any) -> tuple[Tensor, Any]:
    shard = shard_batch(two_rows("packed"), table=table, mesh=mesh)
    if options.get("offload") == "host":
        options["arena"] = Arena()
    return value_and_grad(lambda p: loss(p, shard, CFG, table=table, mesh=mesh, **options))(params)


def close(got: Any, want: Any, tolerance: float) -> None:
    for (name, g), (_, w) in zip(named_leaves(got), named_leaves(want), strict=True):
        assert g.dtype == w.dtype
        assert (g - w).abs().max() <= tolerance * w.abs().max(), name


@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_gradients(name: str) -> None:
    params = init(CFG, seed=1, dtype=torch.float64)
    want_loss, want = step(params, ONE, TABLE)
    got_loss, got = step(params, ONE, TABLE, **OPTIONS[name])
    assert abs(got_loss - want_loss) <= ROUNDING * want_loss
    close(got, want, ROUNDING)


def on_ranks(dp: int, ulysses: int, name: str, options: dict[str, Any]) -> None:
    table, mesh = TABLES[name], build_mesh(dp=dp, ulysses=ulysses)
    params = init(CFG, seed=1, dtype=torch.float64, table=table, mesh=mesh)
    with Comm() as mode:
        _, grads = step(params, mesh, table, **options)
    seen = mode.kinds()
    # the layers' gathers, one for the final norm and the head, and their mirrors; around the embedding, whose
    # rows stay, tokens, x and x's gradient over each axis
    again = 0 if options["remat"] == "none" else 3 + (3 - -(-3 // options.get("group", 1)))
    axes = (dp > 1) + (ulysses > 1)
    if table.rest["wq"].axes:
        assert seen.pop("all_gather") == 3 + again + 1 + 2 * axes
        assert seen.pop("reduce_scatter") == 3 + 1 + axes
    if ulysses > 1 and name == "ulysses":
        # where attention is kept, a run that only finds a group's inputs sends its result alone
        bare = again - 3 if options["remat"] == "attention" else 0
        assert seen.pop("all_to_all") == 3 * 4 + 2 * again - bare
    assert not seen
    specs = param_specs(CFG, table)

    def whole(_: str, grad: Tensor, spec: P, leaf: Any) -> Tensor:
        return redistribute(grad, spec, P(*(None for _ in leaf.shape)), mesh, shape=leaf.shape)

    got = map_params(whole, reduce_grads(grads, specs, mesh), specs, abstract(CFG))
    want = step(init(CFG, seed=1, dtype=torch.float64), ONE, TABLE)[1]
    close(got, want, 1e-12)  # sums over ranks, and through softmax, in another order


@pytest.mark.parametrize("case", ["full", "attention, groups", "offloaded"])
@pytest.mark.parametrize(("dp", "ulysses"), [(2, 2), (1, 4)])
def test_collectives(dp: int, ulysses: int, case: str, ranks: Pool) -> None:
    ranks.run(on_ranks, dp, ulysses, "ulysses", OPTIONS[case])


def test_replicated_at_rest(ranks: Pool) -> None:
    # cases D1, D2, D17: parameters on every rank
    ranks.run(on_ranks, 2, 2, "replicated", {"remat": "full"})


def test_computing_in_another_dtype() -> None:
    """float32 at rest, bfloat16 in use: as with the whole tree cast, gradients in float32."""
    params = init(CFG, seed=1)

    def cast(p: Any) -> Tensor:
        shard = shard_batch(two_rows("packed"), table=TABLE, mesh=ONE)
        narrow = map_params(lambda _, t: t.bfloat16(), p)
        return loss(narrow, shard, CFG, table=TABLE, mesh=ONE)

    want_loss, want = value_and_grad(cast)(params)
    for remat in ("none", "full", "attention"):
        got_loss, got = step(params, ONE, TABLE, dtype=torch.bfloat16, remat=remat)
        assert torch.equal(got_loss, want_loss)
        close(got, want, 0.0)


@pytest.mark.parametrize("head_chunks", [1, 3])
def test_compiled_parts(head_chunks: int) -> None:
    """Compiled once for all layers: no layer, other remat or step after the first step adds a graph."""
    params = init(CFG, seed=1, dtype=torch.float64)
    _, want = step(params, ONE, TABLE)
    torch._dynamo.reset()
    counted = []
    for remat in ("full", "attention", "full"):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        _, got = step(params, ONE, TABLE, remat=remat, compile=True, head_chunks=head_chunks)
        close(got, want, ROUNDING)  # the compiler sums in another order
        counted.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    assert counted[0] > 0
    assert counted[1:] == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_chunks": 0}, "head_chunks=0 must be from 1 to the 6 query heads"),
        ({"head_chunks": 7}, "head_chunks=7 must be from 1 to the 6 query heads"),
        ({"kernel": "reference", "remat": "attention"}, "kernel='reference' must come without head_chunks"),
        ({"kernel": "reference", "head_chunks": 2}, "kernel='reference' must come without head_chunks"),
        ({"remat": ["full"]}, "remat=1 names must go with layers=3"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    # case H44
    params, shard = init(CFG, seed=1), shard_batch(two_rows("packed"), table=TABLE, mesh=ONE)
    with Comm() as comm, pytest.raises(ValueError, match=message):
        loss(params, shard, CFG, table=TABLE, mesh=ONE, **options)
    assert comm.get_total_counts() == 0


def test_autocast_is_refused() -> None:
    params, shard = init(CFG, seed=1), shard_batch(two_rows("packed"), table=TABLE, mesh=ONE)
    with torch.autocast("cpu"), pytest.raises(ValueError, match="autocast must be off"):
        loss(params, shard, CFG, table=TABLE, mesh=ONE)


WINDOWS = replace(CFG, windows=(None, 7, None))
REFUSED: dict[str, tuple[LlamaConfig, dict[str, Any], Batch]] = {
    # only the last of four ranks has the token, or the target
    "token id=101 must be below the model's vocabulary, got vocab_size=101": (CFG, {}, odd("tokens", 101)),
    "token id=5000 must be below the model's vocabulary": (CFG, {}, odd("labels", 5000)),
    # only the layer in the middle has a window
    "kernel='cpu' must take window .a band of keys": (WINDOWS, {"kernel": "cpu"}, two_rows("packed")),
    "kernel='flash' must take device cpu, torch.float64": (CFG, {"kernel": "flash"}, two_rows("whole rows")),
    # only the second of two rows has documents
    "kernel='cudnn' must take device cpu, packed": (
        CFG,
        {"kernel": "cudnn", "dtype": torch.bfloat16},
        two_rows("packed")._replace(cu_seqlens=[[0, SEQ], [0, 11, SEQ]]),
    ),
    "kernel='none' must be one of auto, flash4": (CFG, {"kernel": "none"}, two_rows("packed")),
}  # fmt: skip


def refusals(dp: int, ulysses: int) -> list[str]:
    mesh, said = build_mesh(dp=dp, ulysses=ulysses), []
    for cfg, options, batch in REFUSED.values():
        params = init(cfg, seed=1, dtype=torch.float64, table=TABLE, mesh=mesh)
        shard = shard_batch(batch, table=TABLE, mesh=mesh)
        with Comm() as comm, pytest.raises(ValueError) as refused:  # noqa: PT011
            value_and_grad(
                lambda p, s=shard, c=cfg, o=options: loss(p, s, c, table=TABLE, mesh=mesh, remat="full", **o)
            )(params)
        assert comm.get_total_counts() == 0
        said.append(str(refused.value))
    return said


@pytest.mark.parametrize(("dp", "ulysses"), [(2, 2), (1, 4)])
def test_refused_by_every_rank_before_anything_moves(dp: int, ulysses: int, ranks: Pool) -> None:
    # cases P48, D30: what one rank could see alone must not leave the others waiting
    first, *others = ranks.run(refusals, dp, ulysses, timeout=30)
    assert all(other == first for other in others)
    for message, said in zip(REFUSED, first, strict=True):
        assert re.search(message, said), (message, said)


def test_shards_made_by_hand_are_refused() -> None:
    params, shard = init(CFG, seed=1), shard_batch(two_rows("packed"), table=TABLE, mesh=ONE)
    for changed, message in (
        (
            {"labels": shard.labels[:, 1:]},
            "labels=.2, 22. torch.int64 on cpu must be torch.int64 like the tokens",
        ),
        ({"labels": shard.labels.int()}, "labels=.2, 23. torch.int32 on cpu must be torch.int64"),
        (
            {"positions": shard.positions.float()},
            "positions=.2, 23. torch.float32 on cpu must be torch.int64",
        ),
        ({"positions": shard.positions[:1]}, "positions=.1, 23. torch.int64"),
        # case P66: positions in three dimensions of an image's patches
        ({"positions": shard.positions.expand(3, -1, -1)}, "positions=.3, 2, 23. torch.int64"),
        (
            {name: getattr(shard, name).to("meta") for name in ("tokens", "labels", "positions")},
            "tokens on device=meta must be where the parameters are, got cpu",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            loss(params, shard._replace(**changed), CFG, table=TABLE, mesh=ONE)
    narrow = shard._replace(positions=shard.positions.int())
    assert torch.equal(*(loss(params, s, CFG, table=TABLE, mesh=ONE) for s in (shard, narrow)))


def changed(params: Any, index: int, **leaves: Any) -> Any:
    layers = list(params.layers)
    layers[index] = layers[index]._replace(**leaves)
    return params._replace(layers=tuple(layers))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda p: p._replace(lm_head=None),
            "parameter lm_head=None must be this rank's shard (101, 60)",
        ),
        (lambda p: changed(p, 2, bk=None), "parameter layers.2.bk=None must be this rank's shard (20,)"),
        (
            lambda p: changed(p, 1, bo=torch.ones(60)),
            "parameter layers.1.bo=(60,) must be left out",
        ),
        (
            lambda p: changed(p, 2, wo=p.layers[2].wo[:, 1:]),
            "parameter layers.2.wo=(60, 59) must be this rank's",
        ),
        (
            lambda p: changed(p, 1, w_up=p.layers[1].w_up.double()),
            "parameter layers.1.w_up=torch.float64 must be of the type of all, got embed=torch.float32",
        ),
    ],
)
def test_other_parameters_are_named(wrong: Any, message: str) -> None:
    """Before anything is sent, and not only where they cannot be added up: a head left out is no tied one."""
    params = wrong(init(CFG, seed=1))
    with pytest.raises(ValueError, match=re.escape(message)):
        step(params, ONE, TABLE)
