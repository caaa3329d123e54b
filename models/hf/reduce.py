"""One loss that every rank sees, and gradients summed over the ranks that hold a copy."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from usp.mesh import MeshLike, P, axis_sizes, redistribute


def reported(part: Tensor, mesh: MeshLike, *, averaged: bool = False) -> Tensor:
    """The sum of all ranks' `part`, the same on every rank; its gradient is that of this rank's part alone.

    `averaged`: the engine around (DistributedDataParallel) takes the mean of gradients instead of their sum,
    so this rank's contribution is multiplied by the number of ranks. 1 all-reduce of a scalar per mesh axis,
    none in the backward.
    """
    factor = prod(axis_sizes(mesh).values()) if averaged else 1
    return cast(Tensor, _Reported.apply(part, mesh, factor))  # type: ignore[no-untyped-call]


@torch.no_grad()
def reduce_module_grads(parameters: Iterable[nn.Parameter], mesh: MeshLike) -> None:
    """Sum `.grad` of every trainable parameter over all ranks, in float32 or wider.

    Parameters that are DTensors hold whole sums already. A gradient that is None on this rank counts as zero
    when another rank has one, and stays None when no rank does. 2 all-reduces per mesh axis, however many
    parameters there are.
    """
    held = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    if not held or all(size == 1 for size in axis_sizes(mesh).values()):
        return
    device, summed = held[0].device, P(None, partial=tuple(axis_sizes(mesh)))
    there = torch.tensor([float(p.grad is not None) for p in held], device=device)
    there = redistribute(there, summed, P(None), mesh)
    chosen = [p for p, number in zip(held, there.tolist(), strict=True) if number]
    wide = torch.float64 if any(p.dtype == torch.float64 for p in chosen) else torch.float32
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
    flat = torch.cat([grad.reshape(-1).to(wide) for grad in grads]) if grads else None
    if flat is None:
        return
    flat = redistribute(flat, summed, P(None), mesh)
    for p, part in zip(chosen, torch.split(flat, [p.numel() for p in chosen]), strict=True):
        p.grad = part.view(p.shape).to(p.dtype, copy=True)


class _Reported(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: MeshLike, factor: int) -> Tensor:
        ctx.factor = factor
        everything = P(partial=tuple(axis_sizes(mesh)))
        return redistribute(part.detach().clone(), everything, P(), mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.factor, None, None
