"""Over which process groups a gather over several mesh axes runs, and who stands where in its result."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from usp.mesh.collectives import gather
from usp.mesh.devices import MeshLike, group_name
from usp.mesh.spec import Axes

_ops = torch.ops._c10d_functional
Stages = tuple[tuple[str, int], ...]


def stages_of(
    mesh: MeshLike, axes: Axes, sizes: dict[str, int], group: str | None
) -> tuple[Stages, list[dict[str, int]]]:
    """Groups and sizes to gather over, innermost last, and each member's coordinates in order."""
    everything = axes == tuple(a for a, size in sizes.items() if size > 1)
    if everything and isinstance(mesh, DeviceMesh):
        if group is None and mesh.size() == dist.get_world_size():
            world = dist.group.WORLD
            assert world is not None
            group = str(world.group_name)
        if group is not None:
            ranks = mesh.mesh.flatten().tolist()
            order = sorted(zip(ranks, _places(sizes), strict=True))
            members = [dict(zip(sizes, at, strict=True)) for _, at in order]
            return ((group, len(members)),), members
    stages = tuple((group_name(mesh, a), sizes[a]) for a in axes)
    return stages, [dict(zip(axes, at, strict=True)) for at in _places({a: sizes[a] for a in axes})]


def _places(sizes: dict[str, int]) -> list[tuple[int, ...]]:
    return list(product(*(range(size) for size in sizes.values())))


def gather_flat(x: Tensor, stage: tuple[str, int]) -> Tensor:
    """Under way: [n] -> [parts * n]; to be waited for."""
    return gather(x.view(-1), *stage)


def gather_each(tensors: list[Tensor], stage: tuple[str, int]) -> Callable[[], list[Tensor]]:
    """Under way, as one collective: each [n, ...] -> [parts * n, ...]. What this returns waits for them."""
    return (gather_joined if tensors[0].device.type == "cpu" else gather_coalesced)(tensors, stage)


def gather_coalesced(tensors: list[Tensor], stage: tuple[str, int]) -> Callable[[], list[Tensor]]:
    started = _ops.all_gather_into_tensor_coalesced(tensors, stage[1], stage[0])
    return lambda: [_ops.wait_tensor(t) for t in started]


def gather_joined(tensors: list[Tensor], stage: tuple[str, int]) -> Callable[[], list[Tensor]]:
    """For gloo, which is not safe with several tensors in one gather: see `gather`."""
    if len(tensors) == 1:
        alone = gather(tensors[0], *stage)
        return lambda: [_ops.wait_tensor(alone)]
    sizes, parts = [t.numel() for t in tensors], stage[1]
    started = gather(torch.cat([t.reshape(-1) for t in tensors]), *stage)

    def finish() -> list[Tensor]:
        pieces = _ops.wait_tensor(started).view(parts, sum(sizes)).split(sizes, 1)
        found = []
        for t, piece in zip(tensors, pieces, strict=True):
            found.append(t.new_empty(parts * t.shape[0], *t.shape[1:]))  # memory of its own
            found[-1].view(piece.shape).copy_(piece)
        return found

    return finish


def scatter_each(tensors: list[Tensor], stage: tuple[str, int]) -> list[Tensor]:
    """Under way, as one collective: each [parts * n, ...] -> [n, ...], summed; each to be waited for."""
    return list(_ops.reduce_scatter_tensor_coalesced(tensors, "sum", stage[1], stage[0]))


def scatter_flat(x: Tensor, stage: tuple[str, int]) -> Tensor:
    """Under way: [parts * n] -> [n], summed; to be waited for."""
    return cast(Tensor, _ops.reduce_scatter_tensor(x.view(-1), "sum", stage[1], stage[0]))
