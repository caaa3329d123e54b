"""The named mesh: axes dp, ring and ulysses, always all three, ulysses innermost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from usp.mesh.constants import constant

AXES: tuple[str, str, str] = ("dp", "ring", "ulysses")

MeshLike = DeviceMesh | Mapping[str, int]
"""A DeviceMesh with named axes, or its sizes alone where nothing is communicated."""


def build_mesh(*, dp: int = 1, ring: int = 1, ulysses: int = 1, device_type: str | None = None) -> DeviceMesh:
    """DeviceMesh of shape [dp, ring, ulysses] over all ranks of the initialised process group.

    `device_type` is "cuda" where the process group uses NCCL and "cpu" otherwise, unless given. Raises
    ValueError, on every rank alike, when a degree is below 1 or the world size is not dp * ring * ulysses.
    """
    degrees = {"dp": dp, "ring": ring, "ulysses": ulysses}
    for name, degree in degrees.items():
        if degree < 1:
            raise ValueError(f"{name}={degree} must be at least 1. Use 1 for an axis that is not wanted.")
    if not dist.is_initialized():
        raise ValueError(
            "process group must be initialised first. Launch with torchrun and call init_process_group."
        )
    check_world_size(dist.get_world_size(), **degrees)
    if device_type is None:
        device_type = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    # groups of their own for the axes, so that attention's exchanges do not queue with the weights' gathers,
    # which go over the group of all ranks
    own: dict[int | str, Any] = {
        name: "nccl" for name, n in degrees.items() if n > 1 and device_type == "cuda"
    }
    return init_device_mesh(
        device_type, tuple(degrees.values()), mesh_dim_names=AXES, backend_override=own or None
    )


def check_world_size(world_size: int, *, dp: int, ring: int, ulysses: int) -> None:
    """ValueError, naming the number to change, unless world_size == dp * ring * ulysses."""
    product = dp * ring * ulysses
    if world_size == product:
        return
    others = {"ulysses": dp * ring, "dp": ring * ulysses}
    ways = [f"{name}={world_size // rest}" for name, rest in others.items() if world_size % rest == 0]
    fix = f"set {' or '.join(ways)}" if ways else "change a degree"
    raise ValueError(
        f"world_size={world_size} must equal dp * ring * ulysses, got {dp} * {ring} * {ulysses} = {product}. "
        f"Start torchrun with --nproc-per-node {product}, or {fix}."
    )


def axis_sizes(mesh: MeshLike) -> dict[str, int]:
    """Axis name -> size, outermost first, of a DeviceMesh or of a plain mapping."""
    if isinstance(mesh, DeviceMesh):
        return dict(_named_sizes(mesh))
    return dict(mesh)


@constant
def _named_sizes(mesh: DeviceMesh) -> tuple[tuple[str, int], ...]:
    """A constant inside torch.compile, which in 2.11 cannot read a mesh's shape."""
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("mesh must have named axes. Build it with build_mesh or pass mesh_dim_names.")
    return tuple(zip(names, mesh.shape, strict=True))


def coordinates(mesh: MeshLike) -> dict[str, int]:
    """Axis name -> coordinate of the calling rank.

    A plain mapping stands for one process: ValueError unless every size is 1.
    """
    if isinstance(mesh, DeviceMesh):
        at = mesh.get_coordinate()
        if at is None:
            raise ValueError(
                f"rank={dist.get_rank()} must be part of the mesh {mesh}. Call this on its ranks only."
            )
        return dict(zip(axis_sizes(mesh), at, strict=True))
    if any(size != 1 for size in mesh.values()):
        raise ValueError(
            f"mesh={dict(mesh)} must be a DeviceMesh when an axis is larger than 1. "
            f"Use build_mesh, or pass coords."
        )
    return dict.fromkeys(mesh, 0)


def group_name(mesh: MeshLike, axis: str) -> str:
    """Name under which c10d knows the process group of this rank along `axis`."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh={dict(mesh)} must be a DeviceMesh to communicate over {axis!r}. Use build_mesh."
        )
    return str(mesh.get_group(axis).group_name)


def mesh_device(mesh: MeshLike) -> torch.device:
    """Device of the calling rank: its current CUDA device on a CUDA mesh, otherwise the CPU."""
    if isinstance(mesh, DeviceMesh) and mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
