"""Loss and perplexity of a data set, through the same placements as training and at the same lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from usp.batch import fill_rows
from usp.data import Batch, shard_batch
from usp.mesh import Table, axis_sizes
from usp.mesh.devices import mesh_device
from usp.models.config import LlamaConfig
from usp.models.llama import loss
from usp.models.options import Options
from usp.models.params import Mesh, Params


class Evaluation(NamedTuple):
    """Sum of the losses of all valid labels, in nats, and how many those are; the same on every rank."""

    loss_sum: float
    num_tokens: int

    @property
    def loss(self) -> float:
        """Mean over the valid labels. ValueError when there is none."""
        if not self.num_tokens:
            raise ValueError("num_tokens=0 must be at least 1 for a mean. Give data with labels.")
        return self.loss_sum / self.num_tokens

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def evaluate(
    params: Params,
    batches: Iterable[Batch],
    cfg: LlamaConfig,
    *,
    table: Table,
    mesh: Mesh,
    device: torch.device | str | None = None,
    **options: Unpack[Options],
) -> Evaluation:
    """The model's loss over `batches`, each a whole batch that every rank passes alike.

    params: this rank's shards at rest. Batches may have any number of rows and any length, each its own: rows
    without labels fill them up to what the table deals. Every valid label counts once, whichever batch and
    rank it is on; whole logits never exist and nothing is kept for a gradient. `options` as for
    `usp.models.loss`, of which those about the backward have no effect; remat is "full", under which layers
    are gathered one ahead. Communicates what the forward does, and 1 all-reduce at the end over all ranks.
    """
    target = mesh_device(mesh) if device is None else torch.device(device)
    num_dp = math.prod(axis_sizes(mesh)[axis] for axis in table.tokens[0])
    options["remat"] = "full"
    totals = torch.zeros(2, dtype=torch.float64, device=target)  # losses of this rank, tokens of all
    with torch.no_grad():
        for batch in batches:
            shard = shard_batch(fill_rows(batch, num_dp), table=table, mesh=mesh, device=target)
            one = torch.ones_like(shard.num_valid)  # a sum, not a mean
            total: Tensor = loss(
                params, shard._replace(num_valid=one), cfg, table=table, mesh=mesh, **options
            )
            totals += torch.stack([total.double(), shard.num_valid])
    if dist.is_initialized() and math.prod(axis_sizes(mesh).values()) > 1:
        dist.all_reduce(totals[:1])
    loss_sum, num_tokens = totals.tolist()
    return Evaluation(loss_sum, int(num_tokens))
