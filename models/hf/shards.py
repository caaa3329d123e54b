"""Optimizers and clipping on this rank's shards of parameters that are DTensors.

DTensor decides for every list of tensors where each of them could go: half a minute before the first step of
a model with hundreds of parameters (torch 2.13). Shards of gradients that are whole sums need none of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from usp.mesh import P
from usp.mesh.dtensor import spec_from
from usp.optim import clip_scale, global_norm


def placed(value: DTensor) -> P:
    return spec_from(value.placements, value.device_mesh, value.dim())


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """As torch's `clip_grad_norm_` where every parameter is a DTensor whose gradient is a whole sum.

    Returns the norm before, the same on every rank; `max_norm=None` only measures. 1 all-reduce of a scalar
    per mesh axis, and nothing waits for the device. ValueError for a whole parameter, or no gradients.
    """
    grads, specs, meshes = [], [], []
    for p in parameters:
        if not isinstance(p, DTensor):
            raise ValueError(
                "parameters must all be cut, got a whole one. Use torch.nn.utils.clip_grad_norm_."
            )
        if isinstance(p.grad, DTensor):
            grads.append(p.grad.to_local())
            specs.append(placed(p.grad))
            meshes.append(p.device_mesh)
    if not grads:
        raise ValueError("parameters must have gradients to be clipped, got none. Call backward first.")
    norm = global_norm(grads, specs, meshes[0])
    if max_norm is not None:
        scale = clip_scale(norm, max_norm)
        for grad in grads:  # in the wider type, as `usp.clip_by_global_norm`
            grad.copy_(grad.to(torch.promote_types(grad.dtype, scale.dtype)) * scale)
    return norm


class OnShards:
    """Makes an optimizer of DTensor parameters work on this rank's shards, in place: its state is plain.

    Gradients are those of the DTensors, set and cleared there; the optimizer sees them during a step alone,
    so what unscales gradients between backward and step (float16) cannot be used. ValueError after a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer.state:
            raise ValueError("optimizer must be put on shards before its first step, got one with state.")
        self.pairs: list[tuple[Tensor, nn.Parameter]] = []
        """Each parameter with its shard, in the optimizer's order."""
        for group in optimizer.param_groups:
            group["params"] = [self._shard(p) for p in group["params"]]
        optimizer.register_step_pre_hook(self._lend)
        optimizer.register_step_post_hook(self._take_back)

    def _shard(self, p: Tensor) -> nn.Parameter:
        local = p.to_local() if isinstance(p, DTensor) else p
        shard = nn.Parameter(local.detach(), requires_grad=p.requires_grad)
        self.pairs.append((p, shard))
        return shard

    def _lend(self, *_: Any) -> None:
        for p, shard in self.pairs:
            shard.grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad

    def _take_back(self, *_: Any) -> None:
        for _p, shard in self.pairs:
            shard.grad = None
