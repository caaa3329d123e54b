"""Collectives on plain local tensors: uneven sizes exact, any dtype, traced by torch.compile.

They go through c10d's functional operators, which have a real all-to-all on gloo as well as NCCL. Nothing
here is differentiable; `usp.mesh.redistribute` is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

_ops = torch.ops._c10d_functional
_PLAIN = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_PLAIN |= {torch.uint8, torch.int8, torch.int32, torch.int64}
_BITS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}


def all_to_all(
    x: Tensor,
    group: str,
    *,
    index: int,
    split_dim: int,
    split_sizes: Sequence[int],
    cat_dim: int,
    cat_sizes: Sequence[int],
) -> Tensor:
    """Send piece i of `split_dim` to rank i; join what arrives along another dimension `cat_dim`.

    `split_sizes[i]` is the length sent to rank i, `cat_sizes[i]` the length rank i holds of `cat_dim`,
    `index` this rank's place in the group. One copy packs (none when `split_dim` leads a contiguous x), one
    unpacks.
    """
    front = _bits(x).movedim(split_dim, 0).contiguous()
    row = math.prod(front.shape[1:])
    shapes = []
    for length in cat_sizes:
        shape = list(x.shape)
        shape[split_dim], shape[cat_dim] = split_sizes[index], length
        shapes.append([shape[split_dim], *shape[:split_dim], *shape[split_dim + 1 :]])
    receive = [math.prod(shape) for shape in shapes]
    flat = _ops.all_to_all_single(front.reshape(-1), receive, [n * row for n in split_sizes], group)
    flat = _ops.wait_tensor(flat)
    pieces = [p.view(s).movedim(0, split_dim) for p, s in zip(flat.split(receive), shapes, strict=True)]
    return torch.cat(pieces, dim=cat_dim).view(x.dtype)


def exchange(x: Tensor, group: str, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Pieces of a flat x to the ranks of the group, what comes in rank order. No copies."""
    came: Tensor = _ops.all_to_all_single(_bits(x), list(receive), list(send), group)
    done: Tensor = _ops.wait_tensor(came)
    return done.view(x.dtype)


def start_exchange(x: Tensor, group: str, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """As `exchange`; `wait` for it. x must stay as it is until then."""
    started: Tensor = _ops.all_to_all_single(_bits(x), list(receive), list(send), group)
    return started.view(x.dtype)


def all_gather(x: Tensor, group: str, *, dim: int, length: int, parts: int) -> Tensor:
    """Join the shards of a dimension of `length` cut by the ceil rule over `parts` ranks."""
    front = _pad_front(_bits(x).movedim(dim, 0), -(-length // parts))
    full: Tensor = _ops.wait_tensor(gather(front, group, parts))
    return full[:length].view(x.dtype).movedim(0, dim)


def reduce_scatter(x: Tensor, group: str, *, dim: int, own: int, parts: int) -> Tensor:
    """Sum over the group, in the type of x, and keep the own shard, `own` long, of dimension `dim`."""
    step = -(-x.shape[dim] // parts)
    front = _pad_front(x.movedim(dim, 0), step * parts)
    mine: Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(front, "sum", parts, group))
    return mine[:own].movedim(0, dim)


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Sum over the group, in the type of x."""
    total: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))
    return total


def start_shift(x: Tensor, group: str, index: int, parts: int) -> Tensor:
    """Send a flat x to the next rank of the group and take that of the rank before; `wait` for it."""
    sent, received = [0] * parts, [0] * parts
    sent[(index + 1) % parts] = received[(index - 1) % parts] = x.numel()
    started: Tensor = _ops.all_to_all_single(_bits(x), received, sent, group)
    return started.view(x.dtype)


def gather(x: Tensor, group: str, parts: int) -> Tensor:
    """Under way: contiguous [n, ...] of a type that the backend knows -> [parts * n, ...]; `wait` for it.

    On the CPU by the operator with `out`: the other one becomes gloo's ALLGATHER_COALESCED, and gloo's worker
    threads note the name of what they ended in one string that nothing locks. When two end at once, a name
    of more than 15 letters, which needs memory of its own, is freed twice: the process dies, now or later.
    Compiled, it is waited for at once: inductor gives the memory of x to others after this operator, not
    after the wait.
    """
    if x.device.type != "cpu":
        return cast(Tensor, _ops.all_gather_into_tensor(x, parts, group))
    whole = x.new_empty(parts * x.shape[0], *x.shape[1:])
    started = cast(Tensor, _ops.all_gather_into_tensor_out(x, parts, group, out=whole))
    return wait(started) if torch.compiler.is_compiling() else started


def start_all_gather(x: Tensor, group: str, parts: int) -> Tensor:
    """All ranks' flat x, equally long, one after the other; `wait` for it."""
    return gather(_bits(x), group, parts).view(x.dtype)


def start_reduce_scatter(x: Tensor, group: str, parts: int) -> Tensor:
    """Sum of x [parts, n] over the group, own row of it as [1, n]; `wait` for it."""
    started: Tensor = _ops.reduce_scatter_tensor(x, "sum", parts, group)
    return started


def wait(started: Tensor) -> Tensor:
    """What a `start_...` began, complete: later work on the device may use it. The host does not wait."""
    done: Tensor = _ops.wait_tensor(started)
    return done


def sum_dtype(dtype: torch.dtype, wanted: torch.dtype | None = None) -> torch.dtype:
    """Type of a sum over ranks: for floating point `wanted` or at least float32, else integer."""
    if dtype.is_floating_point:
        if wanted is not None:
            return wanted
        return dtype if dtype.itemsize >= 4 else torch.float32
    return dtype if dtype in _PLAIN else torch.int64


def _bits(x: Tensor) -> Tensor:
    """x, or the same bits as a type that every backend can send (gloo knows no bool, NCCL no int16)."""
    return x if x.dtype in _PLAIN else x.view(_BITS[x.dtype.itemsize])


def _pad_front(x: Tensor, length: int) -> Tensor:
    if x.shape[0] < length:
        x = torch.cat([x, x.new_zeros(length - x.shape[0], *x.shape[1:])])
    return x.contiguous()
