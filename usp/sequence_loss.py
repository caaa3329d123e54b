"""Losses of tokens that do not all count alike, and of whole sequences (preference optimisation, policy
gradients), where a sequence is cut over ranks.

Log-probabilities of tokens are made in tiles, summed per document on each rank, and only those sums travel:
neither logits nor log-probabilities of tokens are ever gathered.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from usp.batch import IGNORE
from usp.data import Batch, Shard, place_tokens
from usp.host import sent
from usp.loss import MAX_TILE_ELEMENTS, gradients, tile_logits, tiles
from usp.mesh import MeshLike, P, Table, axis_sizes, redistribute


def token_losses(x: Tensor, weight: Tensor, labels: Tensor, *, tile: int = 1024) -> Tensor:
    """Minus the log-probability of each label: one number a token, exactly zero where the label is -100.

    x [..., D] and weight [V, D] of one dtype, labels [...] int64; result [...] in float32 (float64 for
    float64 input). Logits exist for `tile` tokens at a time, in the backward too. Reverse mode, any order.
    Does not communicate. Raises ValueError for shapes that do not fit.
    """
    if labels.shape != x.shape[:-1] or weight.dim() != 2 or weight.shape[1] != x.shape[-1] or tile < 1:
        raise ValueError(
            f"labels={tuple(labels.shape)} must have the leading shape of x={tuple(x.shape)} and weight="
            f"{tuple(weight.shape)} its last, got tile={tile}. Pass x [..., D], weight [V, D], labels [...]."
        )
    tile = max(1, min(tile, MAX_TILE_ELEMENTS // weight.shape[0]))
    flat = _TokenLosses.apply(x.reshape(-1, x.shape[-1]), weight, labels.reshape(-1), tile)  # type: ignore[no-untyped-call]
    return cast(Tensor, flat).view(labels.shape)


def weighted_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor, *, tile: int = 1024
) -> Tensor:
    """Sum of each token's loss times its weight; exactly zero, and no gradient, where a weight is 0.

    As `token_losses`, and token_weights [...] of the labels' shape; a scalar. The caller divides by the sum
    of the weights of all ranks.
    """
    if token_weights.shape != labels.shape:
        raise ValueError(
            f"token_weights={tuple(token_weights.shape)} must have the shape of labels, got "
            f"{tuple(labels.shape)}. Pass one number for each label."
        )
    losses = token_losses(x, weight, labels.where(token_weights != 0, IGNORE), tile=tile)
    return (losses * token_weights.to(losses.dtype)).sum()


def document_ids(batch: Batch, shard: Shard, *, table: Table, mesh: MeshLike) -> tuple[Tensor, int]:
    """For this rank's tokens the number of their document in the whole batch, and how many there are.

    [b, s] int64 placed as `shard.tokens`, -1 on padding. Rows are counted in order, and documents in a row;
    without `batch.cu_seqlens` a row is a document. Does not communicate.
    """
    num_rows, seq_len = batch.tokens.shape
    ids, number = torch.full((num_rows, shard.seq_len), -1), 0
    for row in range(num_rows):
        edges = [0, seq_len] if batch.cu_seqlens is None else [int(e) for e in batch.cu_seqlens[row]]
        for start, stop in pairwise(edges):
            ids[row, start:stop] = number
            number += 1
    if batch.valid is not None:
        ids[:, :seq_len].masked_fill_(~batch.valid.cpu().bool(), -1)
    own = place_tokens(ids, -1, seq_len=shard.seq_len, table=table, mesh=mesh)
    return sent(own, shard.tokens.device), number


def sum_by_document(values: Tensor, ids: Tensor, num: int, *, table: Table, mesh: MeshLike) -> Tensor:
    """values [b, s] placed as table.tokens -> [num], the sums of whole documents, on every rank.

    1 all-reduce of `num` numbers for each axis larger than 1 that cuts tokens, the same in the backward.
    """
    own = values.new_zeros(num + 1).index_add(0, torch.where(ids < 0, num, ids).flatten(), values.flatten())
    axes = tuple(axis for axis in axis_sizes(mesh) if axis in table.tokens.axes)
    return redistribute(own[:num], P(None, partial=axes), P(None), mesh)


def sequence_log_probs(
    x: Tensor, weight: Tensor, shard: Shard, ids: Tensor, num: int, *, table: Table, mesh: MeshLike
) -> Tensor:
    """[num]: log-probability of each document's targets together, on every rank.

    x [b, s, D], final hidden states placed as table.tokens (`usp.models.hidden`), weight [V, D]; `ids` and
    `num` from `document_ids`. Targets are `shard.labels`: a prompt masked there does not count.
    """
    return -sum_by_document(token_losses(x, weight, shard.labels), ids, num, table=table, mesh=mesh)


def share(value: Tensor, mesh: MeshLike) -> Tensor:
    """This rank's part of a value that all ranks have computed alike: the SUM over ranks is the value.

    What a loss made of `sequence_log_probs` must end with, as `usp.value_and_grad` differentiates that sum.
    """
    return value / prod(axis_sizes(mesh).values())


def dpo_loss(policy: Tensor, reference: Tensor, *, beta: float = 0.1) -> Tensor:
    """Mean of -log sigmoid(beta * margin) over pairs (Rafailov et al., arXiv 2305.18290).

    policy, reference [2n]: log-probabilities of documents under the two models, chosen and rejected in turn.
    """
    if policy.shape != reference.shape or policy.dim() != 1 or policy.shape[0] % 2:
        raise ValueError(
            f"policy={tuple(policy.shape)} must hold chosen and rejected in turn, got reference="
            f"{tuple(reference.shape)}. Pass [2n] of both."
        )
    gain = policy - reference
    return -torch.nn.functional.logsigmoid(beta * (gain[::2] - gain[1::2])).mean()


class _TokenLosses(torch.autograd.Function):
    """The backward is written in plain operations, so it can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, tile: int) -> Tensor:
        losses = []
        for x, labels in tiles(tile, x_TD, labels_T):
            logits, valid, index = tile_logits(x, weight_VD, labels)
            picked = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
            losses.append((torch.logsumexp(logits, -1) - picked).where(valid, 0.0))
        return torch.cat(losses)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.tile = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        x_TD, weight_VD, labels_T = ctx.saved_tensors
        return *gradients(x_TD, weight_VD, labels_T, grads[0], ctx.tile), None, None
