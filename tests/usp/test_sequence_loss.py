"""Log-probabilities of whole sequences over ranks: DPO's loss and every gradient of one process."""

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pool import Pool
from usp import Batch, shard_batch, value_and_grad
from usp.mesh import TABLES, P, build_mesh, redistribute
from usp.sequence_loss import (
    document_ids,
    dpo_loss,
    sequence_log_probs,
    share,
    sum_by_document,
    token_losses,
    weighted_cross_entropy,
)

ROWS, SEQ, D, V = 4, 13, 6, 17  # S is no multiple of any mesh
CUTS = [[0, 5, 13], [0, 1, 13], [0, 13], [0, 6, 12, 13]]  # 8 documents; one token alone has no target
# float64 sums of up to 52 terms in another order
TOLERANCE = 1e-12


def made() -> tuple[Tensor, Tensor, Batch, Tensor]:
    g = torch.Generator().manual_seed(2)
    table = torch.randn(V, D, generator=g, dtype=torch.float64)
    head = torch.randn(V, D, generator=g, dtype=torch.float64)
    tokens = torch.randint(V, (ROWS, SEQ), generator=g)
    labels = tokens.clone()
    labels[0, :3] = -100  # a prompt
    labels[2, 4:] = -100  # later ranks have no target of this row
    reference = torch.randn(8, generator=g, dtype=torch.float64)
    return table, head, Batch(tokens, labels, CUTS), reference


def dense() -> tuple[Tensor, Tensor, list[Tensor]]:
    """One process, whole logits."""
    table, head, batch, reference = made()
    leaves = table.requires_grad_(), head.requires_grad_()
    logp = (table.tanh()[batch.tokens] @ head.T).log_softmax(-1)
    assert batch.labels is not None
    sums = []
    for row, edges in enumerate(CUTS):
        for a, b in pairwise(edges):
            total = torch.zeros((), dtype=torch.float64)
            for i in range(a, b - 1):
                if batch.labels[row, i + 1] != -100:
                    total = total + logp[row, i, batch.labels[row, i + 1]]
            sums.append(total)
    policy = torch.stack(sums)
    value = dpo_loss(policy, reference, beta=0.3)
    return value.detach(), policy.detach(), list(torch.autograd.grad(value, leaves))


def on_rank(dp: int, ring: int, ulysses: int, name: str) -> Any:
    mesh, scheme = build_mesh(dp=dp, ring=ring, ulysses=ulysses), TABLES[name]
    table, head, batch, reference = made()
    shard = shard_batch(batch, table=scheme, mesh=mesh)
    ids, num = document_ids(batch, shard, table=scheme, mesh=mesh)

    def objective(leaves: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = leaves[0].tanh()[shard.tokens]
        policy = sequence_log_probs(x, leaves[1], shard, ids, num, table=scheme, mesh=mesh)
        return share(dpo_loss(policy, reference, beta=0.3), mesh), policy

    (value, policy), grads = value_and_grad(objective, has_aux=True)((table, head))
    everything = ("dp", "ring", "ulysses")
    total = redistribute(value, P(partial=everything), P(), mesh)
    summed = [redistribute(g, P(None, None, partial=everything), P(None, None), mesh) for g in grads]
    return total, policy, summed


@pytest.mark.parametrize(
    "run", [(1, 1, 4, "ulysses"), (1, 4, 1, "ring"), (1, 2, 2, "usp"), (2, 1, 2, "usp"), (1, 2, 2, "ulysses")]
)
def test_dpo(run: Any, ranks: Pool) -> None:
    # cases D4, D37, H66, H70; the last run repeats the sequence over ring: copies must not count twice
    value, policy, grads = dense()
    for got, log_probs, got_grads in ranks.run(on_rank, *run):
        assert abs(got - value) <= TOLERANCE * value
        assert (log_probs - policy).abs().max() <= TOLERANCE * policy.abs().max()
        for a, b in zip(got_grads, grads, strict=True):
            assert (a - b).abs().max() <= TOLERANCE * b.abs().max()


class Sizes(TorchDispatchMode):
    """Elements of all that is sent, and of the largest tensor of logits, [..., V]."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: set[int] = set()
        self.logits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            self.sent.add(out.numel())
        elif isinstance(out, Tensor) and out.shape[-1:] == (V,) and len(out) != D:  # not the head, turned
            self.logits = max(self.logits, out.numel())
        return out


TILE = 2


def sizes_on_rank() -> tuple[set[int], int]:
    mesh, scheme = build_mesh(ring=2, ulysses=2), TABLES["usp"]
    table, head, batch, reference = made()
    shard = shard_batch(batch, table=scheme, mesh=mesh)
    ids, num = document_ids(batch, shard, table=scheme, mesh=mesh)

    def objective(leaves: tuple[Tensor, Tensor]) -> Tensor:
        x = leaves[0].tanh()[shard.tokens]
        policy = sequence_log_probs(x, leaves[1], shard, ids, num, table=scheme, mesh=mesh)
        return share(dpo_loss(policy, reference, beta=0.3), mesh)

    with patch("usp.sequence_loss.MAX_TILE_ELEMENTS", TILE * V), Sizes() as seen:
        value_and_grad(objective)((table, head))
    return seen.sent, seen.logits


def test_only_sums_travel(ranks: Pool) -> None:
    # cases H66, D53: one number for each of 8 documents is sent, forward and backward; logits of one tile
    for sent, logits in ranks.run(sizes_on_rank):
        assert sent == {8}
        assert logits == TILE * V


@pytest.mark.parametrize("tile", [1, 5, 1024])
def test_token_losses(tile: int) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, D, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(V, (2, 7), generator=g)
    labels[0, 2] = labels[1, 5] = -100
    upstream = torch.randn(2, 7, generator=g, dtype=torch.float64)
    got = token_losses(x, weight, labels, tile=tile)
    logits = (x @ weight.T).flatten(0, 1)
    want = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="none").view(2, 7)
    assert (got - want).abs().max() <= TOLERANCE
    assert got[0, 2] == got[1, 5] == 0
    for a, b in zip(
        *(torch.autograd.grad((y * upstream).sum(), (x, weight)) for y in (got, want)), strict=True
    ):
        assert (a - b).abs().max() <= TOLERANCE * b.abs().max()
    assert torch.autograd.gradgradcheck(lambda x, w: token_losses(x, w, labels, tile=tile), (x, weight))


def test_weights() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, D, generator=g, dtype=torch.float64, requires_grad=True)
    head = torch.randn(V, D, generator=g, dtype=torch.float64)
    head[3] *= 1e200  # the loss of token 3 is infinite: a weight of 0 must hide it
    head.requires_grad_()
    labels, weights = torch.randint(4, V, (2, 7), generator=g), torch.rand(2, 7, generator=g)
    labels[0, 2], labels[1, 4] = -100, 3
    weights[1, 4] = weights[0, 0] = 0.0
    got = weighted_cross_entropy(x, head, labels, weights, tile=3)
    kept = (labels != -100) & (weights != 0)
    want = (F.cross_entropy((x @ head.T)[kept], labels[kept], reduction="none") * weights[kept]).sum()
    assert torch.isfinite(got)
    assert abs(got - want) <= TOLERANCE * want
    for a, b in zip(*(torch.autograd.grad(y, (x, head)) for y in (got, want)), strict=True):
        assert (a - b).abs().max() <= TOLERANCE * b.abs().max()


def test_padding_belongs_to_no_document() -> None:
    one = {"dp": 1, "ring": 1, "ulysses": 1}
    valid = torch.arange(6) < torch.tensor([[4], [6]])
    batch = Batch(torch.zeros(2, 6, dtype=torch.int64), valid=valid)
    shard = shard_batch(batch, table=TABLES["usp"], mesh=one)
    ids, num = document_ids(batch, shard, table=TABLES["usp"], mesh=one)
    assert num == 2
    assert ids.tolist() == [[0, 0, 0, 0, -1, -1], [1] * 6]
    sums = sum_by_document(torch.ones(2, 6), ids, num, table=TABLES["usp"], mesh=one)
    assert sums.tolist() == [4, 6]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="leading shape"):
        token_losses(torch.ones(2, D), torch.ones(V, D), torch.zeros(3, dtype=torch.int64))
    labels = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="the shape of labels"):
        weighted_cross_entropy(torch.ones(2, D), torch.ones(V, D), labels, torch.ones(3))
    with pytest.raises(ValueError, match="in turn"):
        dpo_loss(torch.ones(3), torch.ones(3))
