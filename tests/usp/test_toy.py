"""A model of one attention layer, trained on 1 to 4 ranks, against one process without this library."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.mesh.cases import Sizes, mesh_of, outside
from tests.pool import Pool
from tests.usp.dense import dense_attention, normal
from usp import (
    Batch,
    Shard,
    adamw_init,
    adamw_update,
    attention,
    clip_by_global_norm,
    heads_to_seq,
    linear_cross_entropy,
    reduce_grads,
    scan,
    seq_to_heads,
    shard_batch,
    value_and_grad,
)
from usp.mesh import TABLES, P, Table, local_slices, redistribute

VOCAB, DIM, SIZE, LENGTH, ROWS = 29, 10, 4, 19, 2
STEPS, LR, MAX_NORM, DECAY = 3, 0.02, 0.3, 0.1
CUTS = [[0, 6, 7, 19], [0, 11, 19]]
TABLE = TABLES["ulysses"]


class Toy(NamedTuple):
    """embed, head [V, D], place [S, D], wq [N * H, D], wk, wv [K * H, D], wo [D, N * H], gain [D]."""

    embed: Any
    place: Any
    wq: Any
    wk: Any
    wv: Any
    wo: Any
    head: Any
    gain: Any


def shapes(heads: tuple[int, int]) -> Toy:
    n, k = (count * SIZE for count in heads)
    return Toy((VOCAB, DIM), (LENGTH, DIM), (n, DIM), (k, DIM), (k, DIM), (DIM, n), (VOCAB, DIM), (DIM,))


def initial(heads: tuple[int, int]) -> Toy:
    return Toy(*(normal(*shape, seed=i) for i, shape in enumerate(shapes(heads))))


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[0, 8:12] = -100
    labels[1, 14:] = -100  # the last of 4 ranks has no label in this row
    return Batch(tokens, labels=labels, cu_seqlens=CUTS)


def dense_loss(p: Toy, heads: tuple[int, int]) -> Tensor:
    """Plain torch, label by label: the mean over the targets of the batch."""
    tokens, labels = batch()[:2]
    assert labels is not None
    positions = torch.tensor([[i - max(c for c in cuts if c <= i) for i in range(LENGTH)] for cuts in CUTS])
    x = p.embed[tokens] + p.place[positions]
    q, k, v = ((x @ w.T).unflatten(-1, (-1, SIZE)) for w in (p.wq, p.wk, p.wv))
    edges = [0, *(row * LENGTH + c for row, cuts in enumerate(CUTS) for c in cuts[1:])]
    x = x + dense_attention(q, k, v, edges=edges).flatten(-2) @ p.wo.T
    logits = (x * p.gain) @ p.head.T
    losses = [
        F.cross_entropy(logits[row, i], labels[row, i + 1])
        for row, cuts in enumerate(CUTS)
        for i in range(LENGTH - 1)
        if i + 1 not in cuts and labels[row, i + 1] != -100
    ]
    return torch.stack(losses).mean()


def at_rest(table: Table) -> Toy:
    """Matrices sharded over every rank or nowhere, as the table says of its own; the vector likewise."""
    return Toy(*(table.rest["norm" if name == "gain" else "wq"] for name in Toy._fields))


def loss(p: Toy, shard: Shard, heads: tuple[int, int], mesh: Any, table: Table, remat: str) -> Tensor:
    """This rank's part of the mean."""
    copies = 1 if table.tokens[1] else dist.get_world_size(mesh.get_group("ulysses"))

    def block(x: Tensor, layer: Toy, cu_seqlens: Tensor) -> Tensor:
        w = Toy(
            *(in_use(t, s, n, mesh) for t, s, n in zip(layer, at_rest(table), shapes(heads), strict=True))
        )
        q, k, v = ((x @ m.T).unflatten(-1, (-1, SIZE)) for m in (w.wq, w.wk, w.wv))
        q, k, v = seq_to_heads(q, k, v, mesh=mesh, table=table, seq_len=shard.seq_len)
        o = attention(q, k, v, cu_seqlens=cu_seqlens)
        o = heads_to_seq(o, num_heads=heads[0], mesh=mesh, table=table, seq_len=shard.seq_len)
        return x + o.flatten(-2) @ w.wo.T

    whole = Toy(*(in_use(t, s, n, mesh) for t, s, n in zip(p, at_rest(table), shapes(heads), strict=True)))
    x = whole.embed[shard.tokens] + whole.place[shard.positions]
    x = scan(block, x, [p], shard.cu_seqlens, remat=remat)
    total = linear_cross_entropy(x * whole.gain, whole.head, shard.labels, tile=3)
    return total / (shard.num_valid * copies)


def in_use(t: Tensor, rest: P, shape: tuple[int, ...], mesh: Any) -> Tensor:
    return redistribute(t, rest, P(*[None] * len(shape)), mesh, shape=shape)


def train(sizes: Sizes, heads: tuple[int, int], table_name: str, remat: str) -> list[Any]:
    """Loss, norm and whole gradients of the first step, then losses, and the parameters after all."""
    mesh, table = mesh_of(sizes), TABLES[table_name]
    if outside(mesh):
        return []
    shard, specs = shard_batch(batch(), table=table, mesh=mesh), at_rest(table)
    params = Toy(
        *(
            t[local_slices(s, tuple(t.shape), mesh)].clone()
            for t, s in zip(initial(heads), specs, strict=True)
        )
    )
    state, results = adamw_init(params), []

    def whole(tree: Toy) -> list[Tensor]:
        return [in_use(t, s, n, mesh).clone() for t, s, n in zip(tree, specs, shapes(heads), strict=True)]

    for _ in range(STEPS):
        value, grads = value_and_grad(loss)(params, shard, heads, mesh, table, remat)
        value = redistribute(value, P(partial=("dp", "ring", "ulysses")), P(), mesh)
        grads = reduce_grads(grads, specs, mesh)
        full = whole(grads)
        grads, norm = clip_by_global_norm(grads, specs, mesh, MAX_NORM)
        results.append((value, norm, full))
        params, state = adamw_update(params, grads, state, lr=LR, weight_decay=DECAY)
    return [*results, whole(params)]


def dense_train(heads: tuple[int, int]) -> list[Any]:
    params = [t.requires_grad_() for t in initial(heads)]
    groups = [
        {"params": params[:-1], "weight_decay": DECAY},
        {"params": params[-1:], "weight_decay": 0.0},
    ]
    adamw, results = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8), []
    for _ in range(STEPS):
        adamw.zero_grad()
        value = dense_loss(Toy(*params), heads)
        value.backward()
        full = [p.grad.clone() for p in params if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        results.append((value.detach(), norm, full))
        adamw.step()
    return [*results, [p.detach() for p in params]]


RUNS: list[tuple[Sizes, tuple[int, int], str, str]] = [
    ((1, 1, 1), (9, 3), "ulysses", "full"),
    ((1, 1, 2), (9, 3), "ulysses", "none"),
    ((1, 1, 2), (3, 1), "ulysses", "full"),
    ((1, 1, 2), (6, 2), "replicated", "full"),
    ((1, 1, 3), (5, 5), "ulysses", "full"),
    ((1, 1, 4), (9, 3), "ulysses", "full"),
    ((1, 1, 4), (10, 5), "ulysses", "none"),
    ((2, 1, 2), (7, 7), "ulysses", "full"),
    ((2, 1, 2), (8, 2), "replicated", "none"),
]
# float64, the same terms summed in another order over up to 38 tokens and 4 ranks, relative to the largest
# entry. Later steps: AdamW divides by the root of the second moment, which makes rounding in a gradient entry
# that is 1000 times smaller than the largest one a relative 1e-9 of a step.
ROUNDING, AFTER_STEPS = 1e-12, 1e-9


def close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    return got.shape == want.shape and bool((got - want).abs().max() <= tolerance * want.abs().max())


@pytest.mark.parametrize("one", RUNS, ids=str)
def test_training_equals_one_process(one: Any, ranks: Pool) -> None:
    # cases H1, H4, H5, H6, H8, H10, H17, H22, H54, D1, D2, D5, D8, D12, D14, D17, D25, P29
    # and P60, P62, P64, P65
    want = dense_train(one[1])
    by_rank = [r for r in ranks.run(train, *one) if r]
    assert len(by_rank) == one[0][0] * one[0][1] * one[0][2]
    for results in by_rank:
        for step in range(STEPS):
            tolerance = ROUNDING if step == 0 else AFTER_STEPS
            assert close(results[step][0], want[step][0], tolerance), ("loss", step)
            assert close(results[step][1], want[step][1], tolerance), ("norm", step)
            for name, got, grad in zip(Toy._fields, results[step][2], want[step][2], strict=True):
                assert grad.abs().max() > 0, name
                assert close(got, grad, tolerance), (name, step)
        for name, got, param in zip(Toy._fields, results[STEPS], want[STEPS], strict=True):
            assert close(got, param, AFTER_STEPS), name
    assert want[STEPS - 1][0] < want[0][0]
