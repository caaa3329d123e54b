"""The embedding, gathered or looked up where its rows are at rest: the same values to the last bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm import Comm
from tests.models.batches import tokens_of
from tests.models.test_options import CFG
from tests.models.test_zero_modes import ZERO0
from tests.pool import Pool, pool_of
from usp import Batch, shard_batch
from usp.mesh import TABLES, P, build_mesh, local_slices, redistribute
from usp.models import LlamaConfig, init
from usp.models.embedding import embed, rows_stay

WIDE = replace(CFG, vocab_size=1003)  # more rows than tokens, not divisible by the ranks
NARROW = replace(CFG, vocab_size=29)
WHOLE = P(None, None)
ranks = pool_of(4)


def looked_up(cfg: LlamaConfig, name: str, sizes: dict[str, int], dtype: torch.dtype) -> tuple[Any, ...]:
    """All whole: the tokens as they are cut, rows, x, a gradient of x, the rows' gradient; what was sent."""
    table, mesh = (
        TABLES[name],
        build_mesh(dp=sizes.get("dp", 1), ring=sizes.get("ring", 1), ulysses=sizes.get("ulysses", 1)),
    )
    params = init(cfg, seed=3, dtype=torch.float64, table=table, mesh=mesh)
    shard = shard_batch(Batch(tokens=tokens_of(2, 23, cfg.vocab_size)), table=table, mesh=mesh)
    rows = params.embed.requires_grad_()
    with Comm() as mode:
        x, gathered = embed(params, shard, cfg, table, mesh, dtype)
    there = mode.kinds()
    shape, full = (2, shard.seq_len, cfg.hidden_size), (cfg.vocab_size, cfg.hidden_size)
    up = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    with Comm() as mode:
        (grad,) = torch.autograd.grad(x, rows, up[local_slices(table.residual, shape, mesh)])
    assert (gathered is None) == (cfg == WIDE)
    assert x.dtype == dtype
    assert grad.dtype == torch.float64
    tokens = redistribute(shard.tokens, table.tokens, WHOLE, mesh, shape=shape[:2])
    x = redistribute(x.detach(), table.residual, P(None, None, None), mesh, shape=shape)
    rows, grad = (
        redistribute(t.detach(), table.rest["embed"], WHOLE, mesh, shape=full) for t in (rows, grad)
    )
    return tokens, rows, x, up, grad, (there, mode.kinds())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("ulysses", {"ulysses": 4}), ("usp", {"ring": 2, "ulysses": 2}), ("odysseus", {"dp": 2, "ulysses": 2})],
)
@pytest.mark.parametrize("cfg", [WIDE, NARROW], ids=["rows stay", "gathered"])
def test_equals_one_lookup(
    cfg: LlamaConfig, name: str, sizes: dict[str, int], dtype: torch.dtype, ranks: Pool
) -> None:
    for tokens, rows, x, up, grad, sent in ranks.run(looked_up, cfg, name, sizes, dtype):
        assert torch.equal(x, rows.to(dtype)[tokens])
        want, size = (
            torch.zeros_like(rows).index_add(0, tokens.flatten(), t.double().flatten(0, 1))
            for t in (up, up.abs())
        )
        times = tokens.flatten().bincount(minlength=cfg.vocab_size).double().unsqueeze(1)
        # as many sums as the row is read, each rounded: in the type at rest where the rows stay there
        eps = torch.finfo(torch.float64 if cfg == WIDE else dtype).eps
        assert ((grad - want).abs() <= times * size * eps).all()
        axes = len(sizes)
        if cfg == WIDE:
            assert sent == ({"all_gather": axes, "reduce_scatter": axes}, {"all_gather": axes})
        else:
            assert sent == ({"all_gather": 1}, {"reduce_scatter": 1})


@pytest.mark.parametrize("token", [-1, WIDE.vocab_size, 10**9])
def test_an_id_without_a_row(token: int, ranks: Pool) -> None:
    """No rank has the row: an error on all of them, as from a lookup in the whole embedding."""
    assert all(ranks.run(refused, token))


def refused(token: int) -> bool:
    table, mesh = TABLES["ulysses"], build_mesh(ulysses=4)
    params = init(WIDE, seed=3, dtype=torch.float64, table=table, mesh=mesh)
    shard = shard_batch(Batch(tokens=torch.ones(2, 23, dtype=torch.int64)), table=table, mesh=mesh)
    tokens = shard.tokens.clone()
    tokens[-1, 2 if mesh.get_local_rank("ulysses") == 1 else 0] = token
    with pytest.raises(IndexError):
        embed(params, shard._replace(tokens=tokens), WIDE, table, mesh, None)
    return True


def test_many_of_one_token(ranks: Pool) -> None:
    """Ones added in bfloat16 would stop at 256."""
    assert ranks.run(one_token) == [2048.0] * 4


def one_token() -> float:
    cfg, mesh = replace(WIDE, vocab_size=4096), build_mesh(ulysses=4)
    params = init(cfg, seed=3, dtype=torch.float32, table=TABLES["ulysses"], mesh=mesh)
    batch = Batch(tokens=torch.full((1, 2048), 7, dtype=torch.int64))
    shard = shard_batch(batch, table=TABLES["ulysses"], mesh=mesh)
    rows = params.embed.requires_grad_()
    x, gathered = embed(params, shard, cfg, TABLES["ulysses"], mesh, torch.bfloat16)
    assert gathered is None
    (grad,) = torch.autograd.grad(x, rows, torch.ones_like(x))
    total = grad.sum(0)[0]
    dist.all_reduce(total)
    return float(total)


def test_which_sends_less() -> None:
    eight, table = {"dp": 1, "ring": 2, "ulysses": 4}, TABLES["usp"]
    cfg = replace(CFG, vocab_size=128256)
    most = 128256 * (2 + 4) // (2 * 2)  # gradients of weights travel in float32
    assert rows_stay(cfg, table, eight, most - 1, torch.bfloat16)
    assert not rows_stay(cfg, table, eight, most, torch.bfloat16)
    assert rows_stay(cfg, table, eight, 128255, torch.float32)
    assert not rows_stay(cfg, table, eight, 128256, torch.float32)
    assert rows_stay(cfg, table, eight, 128255, torch.bfloat16, back=False)
    assert not rows_stay(cfg, table, eight, 128256, torch.bfloat16, back=False)


@pytest.mark.parametrize("how", ["no_grad", "frozen", "wanted"])
def test_without_a_gradient(how: str, ranks: Pool) -> None:
    """46 tokens with padding to 48, 40 rows: fewer bytes than x only there and back."""
    for gathered in ranks.run(is_gathered, how):
        assert gathered == (how != "wanted")


def is_gathered(how: str) -> bool:
    cfg, table, mesh = replace(WIDE, vocab_size=40), TABLES["ulysses"], build_mesh(ulysses=4)
    params = init(cfg, seed=3, dtype=torch.float32, table=table, mesh=mesh)
    shard = shard_batch(Batch(tokens=tokens_of(2, 23, 40)), table=table, mesh=mesh)
    params.embed.requires_grad_(how != "frozen")
    with torch.set_grad_enabled(how != "no_grad"):
        return embed(params, shard, cfg, table, mesh, torch.bfloat16)[1] is not None


@pytest.mark.parametrize(
    ("table", "sizes", "changes"),
    [
        (TABLES["usp"], {"dp": 1, "ring": 1, "ulysses": 1}, {}),
        (TABLES["usp"], {"dp": 1, "ring": 1, "ulysses": 4}, {"tie_embeddings": True}),
        (TABLES["usp"], {"dp": 1, "ring": 1, "ulysses": 8}, {"vocab_size": 14}),  # 7 ranks with 2 rows each
        (ZERO0, {"dp": 1, "ring": 1, "ulysses": 4}, {}),
        (TABLES["ring"], {"dp": 1, "ring": 2, "ulysses": 2}, {}),  # two ranks have the same tokens
        # the sum of x's gradient over ranks would be one of many terms, in the type computed in
        (replace(TABLES["ulysses"], residual=P("dp", None, None)), {"dp": 1, "ring": 1, "ulysses": 4}, {}),
    ],
    ids=["one rank", "also the head", "a rank without rows", "replicated", "replicated tokens", "whole x"],
)
def test_where_it_is_gathered(table: Any, sizes: dict[str, int], changes: dict[str, Any]) -> None:
    assert not rows_stay(replace(WIDE, **changes), table, sizes, 4, torch.bfloat16)
