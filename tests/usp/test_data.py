"""`shard_batch` on several meshes against an account of the whole batch token by token, and its inverse."""

from collections.abc import Callable
from itertools import product
from math import lcm, prod
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.mesh.cases import Sizes, mesh_of, outside
from tests.pool import Pool
from usp import Batch, Shard, shard_batch, unshard_batch
from usp.mesh import TABLES, Table, axis_sizes, local_slices
from usp.spans import Mask, runs

ONE = {"dp": 1, "ring": 1, "ulysses": 1}
MESHES: tuple[Sizes, ...] = (
    (1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2), (1, 1, 3), (1, 4, 1), (1, 3, 1)
)  # fmt: skip


def tokens_of(rows: int, length: int) -> Tensor:
    return torch.arange(1, rows * length + 1).view(rows, length) * 7


def masked(labels: Tensor) -> Tensor:
    labels = labels.clone()
    labels[:, 2:4] = -100
    labels[0, 5:] = -100
    return labels


BATCHES = {
    "even": Batch(tokens_of(2, 12)),
    "uneven": Batch(tokens_of(2, 13)),
    "shorter than the ranks": Batch(tokens_of(2, 3)),
    "one token": Batch(tokens_of(2, 1)),
    "labels": Batch(tokens_of(2, 13), labels=masked(tokens_of(2, 13) + 1)),
    "packed": Batch(tokens_of(2, 13), cu_seqlens=[[0, 5, 6, 13], torch.tensor([0, 9, 13])]),
    "padded": Batch(tokens_of(2, 11), valid=torch.arange(11) < torch.tensor([[8], [11]])),
    "all at once": Batch(
        tokens_of(2, 14),
        labels=masked(tokens_of(2, 14) + 1),
        cu_seqlens=[[0, 5, 6, 13, 14], [0, 4, 9, 14]],
        valid=torch.arange(14) < torch.tensor([[7], [9]]),
    ),
    "a row of padding": Batch(tokens_of(2, 6), valid=torch.arange(6) < torch.tensor([[0], [6]])),
}


def account(batch: Batch, padded: int) -> tuple[Tensor, Tensor, Tensor, list[list[int]]]:
    """(tokens, labels, positions) [B, padded] and each row's boundaries, one token at a time."""
    rows, length = batch.tokens.shape
    labels = batch.tokens if batch.labels is None else batch.labels
    out = torch.zeros(3, rows, padded, dtype=torch.int64)
    out[1] = -100
    bounds = []
    for row in range(rows):
        cuts = [0, length] if batch.cu_seqlens is None else [int(c) for c in batch.cu_seqlens[row]]
        document = []
        for i in range(padded):
            real = i < length and (batch.valid is None or bool(batch.valid[row, i]))
            # padding in the batch is one document, what the mesh needs on top another
            document.append(sum(c <= i for c in cuts[1:]) if real else ("valid" if i < length else "mesh"))
        for i in range(padded):
            out[2, row, i] = i - document.index(document[i])
            if i < length:
                out[0, row, i] = batch.tokens[row, i]
            if i + 1 < padded and document[i] == document[i + 1] and isinstance(document[i], int):
                out[1, row, i] = labels[row, i + 1]
        bounds.append([i for i in range(1, padded) if document[i] != document[i - 1]] + [padded])
    return out[0], out[1], out[2], bounds


def held_order(length: int, ring: int) -> Tensor:
    """Natural positions in the order in which they are cut: the outermost two of 2 * ring chunks first."""
    if ring == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * ring)
    return torch.cat([chunk for i in range(ring) for chunk in (chunks[i], chunks[-1 - i])])


def check_shard(shard: Shard, batch: Batch, table: Table, mesh: Any) -> None:
    sizes = axis_sizes(mesh)
    rows, length = batch.tokens.shape
    parts = prod(sizes[axis] for axis in table.tokens[1])
    ring = prod(sizes[axis] for axis in table.q[1])
    parts = parts if ring == 1 else lcm(parts, 2 * ring)
    assert shard.seq_len == -(-length // parts) * parts  # no longer than the mesh needs (case P44)
    assert shard.orig == (rows, length)
    tokens, labels, positions, bounds = account(batch, shard.seq_len)
    at = local_slices(table.tokens, (rows, shard.seq_len), mesh)
    order = held_order(shard.seq_len, ring)
    assert torch.equal(shard.tokens, tokens[:, order][at])
    assert torch.equal(shard.labels, labels[:, order][at])  # cases H1, D14: shifted before the cut
    assert torch.equal(shard.positions, positions[:, order][at])  # cases H28, H30, P61
    edges = [0]
    for i, row in enumerate(range(rows)[at[0]]):
        edges += [i * shard.seq_len + edge for edge in bounds[row]]
    assert shard.cu_seqlens.tolist() == edges  # cases H34, H36, P58: global, of whole documents
    assert shard.cu_seqlens.dtype == torch.int32
    assert shard.num_valid.item() == (labels != -100).sum().item()  # cases H6, H17, D6: of the whole batch


def every_batch(sizes: Sizes) -> list[list[Tensor]]:
    mesh = mesh_of(sizes)
    if outside(mesh):
        return []
    cut = []
    for batch, table in product(BATCHES.values(), TABLES.values()):
        shard = shard_batch(batch, table=table, mesh=mesh)
        check_shard(shard, batch, table, mesh)
        shard_again = shard_batch(batch, table=table, mesh=mesh)  # case D40: nothing is used up
        assert torch.equal(shard.tokens, shard_again.tokens)
        assert torch.equal(unshard_batch(shard.tokens, shard, table=table, mesh=mesh), batch.tokens)
        wide = torch.stack([shard.tokens, -shard.tokens], -1).double()
        back = unshard_batch(wide, shard, table=table, mesh=mesh)  # cases H37, H38, P44: padding gone
        assert torch.equal(back, torch.stack([batch.tokens, -batch.tokens], -1).double())
        if table.name == "usp":
            cut.append([shard.tokens, shard.labels, shard.positions])
    return cut


def assert_put_together(found: list[list[list[Tensor]]], sizes: Sizes) -> None:
    """What `every_batch` found on all ranks, one after the other, is the batch in the order of a ring."""
    by_rank = [r for r in found if r]
    dp, seq = sizes[0], sizes[1] * sizes[2]
    assert len(by_rank) == dp * seq
    unit = seq if sizes[1] == 1 else lcm(seq, 2 * sizes[1])
    for i, batch in enumerate(BATCHES.values()):
        length = -(-batch.tokens.shape[1] // unit) * unit
        order = held_order(length, sizes[1])  # case P42
        want = [t[:, order] for t in account(batch, length)[:3]]
        for j in range(3):
            rows = [torch.cat([by_rank[d * seq + s][i][j] for s in range(seq)], 1) for d in range(dp)]
            assert torch.equal(torch.cat(rows), want[j]), (list(BATCHES)[i], j)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_shards_put_together_are_the_batch(sizes: Sizes, ranks: Pool) -> None:
    # cases H45, H58: each token once, every rank of a group the same sample
    assert_put_together(ranks.run(every_batch, sizes), sizes)


@pytest.mark.parametrize("name", BATCHES)
def test_one_process(name: str) -> None:
    shard = shard_batch(BATCHES[name], table=TABLES["ulysses"], mesh=ONE)
    check_shard(shard, BATCHES[name], TABLES["ulysses"], ONE)
    assert torch.equal(
        unshard_batch(shard.tokens, shard, table=TABLES["ulysses"], mesh=ONE), BATCHES[name].tokens
    )


def test_the_batch_is_not_changed_and_not_aliased() -> None:
    # case D54
    batch = BATCHES["all at once"]
    before = batch.tokens.clone(), batch.labels.clone()  # type: ignore[union-attr]
    shard = shard_batch(batch, table=TABLES["ulysses"], mesh=ONE)
    shard.labels.zero_()
    shard.tokens.zero_()
    assert torch.equal(batch.tokens, before[0])
    assert torch.equal(batch.labels, before[1])  # type: ignore[arg-type]


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.untyped_storage().nbytes() // 8)
        return out


def test_nothing_is_larger_than_the_batch() -> None:  # case P56
    """A quarter of a million tokens in a thousand documents, cut for a ring of 8: no mask of S x S."""
    seq_len = 2**18
    batch = Batch(torch.zeros(1, seq_len, dtype=torch.int64), cu_seqlens=[range(0, seq_len + 1, 256)])
    mesh = {"dp": 1, "ring": 8, "ulysses": 1}
    with Largest() as seen, patch("usp.mesh.spec.coordinates", return_value=dict.fromkeys(mesh, 0)):
        shard = shard_batch(batch, table=TABLES["ring"], mesh=mesh, device="cpu")
        assert shard.tokens.shape == (1, seq_len // 8)
        mask = Mask(tuple(shard.cu_seqlens.tolist()), 1, seq_len, True, None, 1.0, 0.0, 8)
        cells = sum(len(run.segments.cu_q) for source in range(8) for run in runs(mask, 0, source))
    assert cells <= 2 * 1024
    assert seq_len <= seen.elements <= 2 * seq_len


T = tokens_of(2, 6)


def test_rows_that_dp_does_not_divide() -> None:
    with pytest.raises(ValueError, match="batch size=2 must be a multiple of the ranks that share its rows"):
        shard_batch(Batch(T), table=TABLES["ulysses"], mesh={"dp": 3, "ring": 1, "ulysses": 1})
    with pytest.raises(ValueError, match="must be a DeviceMesh"):
        shard_batch(Batch(T), table=TABLES["ulysses"], mesh={"dp": 1, "ring": 1, "ulysses": 2})


def test_what_all_ranks_can_refuse_alike() -> None:
    """The largest id and unequal documents are the whole batch's, also where this rank holds none of it."""
    batch = Batch(T, labels=T.where(T != 84, 99), cu_seqlens=[[0, 6], [0, 4, 6]])
    for name, sizes in (("ulysses", (2, 1, 2)), ("usp", (2, 2, 1))):
        mesh: dict[str, int] = dict(zip(("dp", "ring", "ulysses"), sizes, strict=True))
        for place in product(*map(range, sizes)):
            at = dict(zip(mesh, place, strict=True))
            with patch("usp.mesh.spec.coordinates", return_value=at):
                shard = shard_batch(batch, table=TABLES[name], mesh=mesh, device="cpu")
            assert (shard.num_ids, shard.packed) == (100, True), (name, at)
    shards = [
        shard_batch(b, table=TABLES["ulysses"], mesh=ONE) for b in (Batch(T), batch._replace(labels=None))
    ]
    assert [(s.num_ids, s.packed) for s in shards] == [(85, False), (85, True)]
    halves = Batch(T, cu_seqlens=[[0, 3, 6], [0, 3, 6]])
    assert not shard_batch(halves, table=TABLES["ulysses"], mesh=ONE).packed
    with (
        patch("usp.data.MOST_TOKENS", 11),
        pytest.raises(
            ValueError, match="must leave a rank at most 11 tokens of whole rows, got S=6 and 2 rows"
        ),
    ):
        shard_batch(Batch(T), table=TABLES["ulysses"], mesh=ONE)
