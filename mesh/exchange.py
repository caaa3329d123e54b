"""`exchange`: one all-to-all with explicit piece sizes, for moves that no spec can say (replicated heads)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from usp.mesh import collectives
from usp.mesh.devices import MeshLike, axis_sizes, coordinates, group_name
from usp.mesh.linear import apply_linear


@dataclass(frozen=True)
class Exchange:
    group: str
    index: int
    split_dim: int
    split_sizes: tuple[int, ...]
    cat_dim: int
    cat_sizes: tuple[int, ...]

    def empty(self) -> bool:
        return False

    def run(self, x: Tensor) -> Tensor:
        return collectives.all_to_all(
            x,
            self.group,
            index=self.index,
            split_dim=self.split_dim,
            split_sizes=self.split_sizes,
            cat_dim=self.cat_dim,
            cat_sizes=self.cat_sizes,
        )

    def transposed(self) -> Exchange:
        back = (self.cat_dim, self.cat_sizes, self.split_dim, self.split_sizes)
        return Exchange(self.group, self.index, *back)

    def batched(self, size: int) -> Exchange:
        return Exchange(
            self.group, self.index, self.split_dim + 1, self.split_sizes, self.cat_dim + 1, self.cat_sizes
        )


def exchange(
    x: Tensor,
    mesh: MeshLike,
    axis: str,
    *,
    split_dim: int,
    split_sizes: tuple[int, ...],
    cat_dim: int,
    cat_sizes: tuple[int, ...],
) -> Tensor:
    """Send piece i of `split_dim` to rank i of `axis`, join what arrives along `cat_dim`: 1 all-to-all.

    `split_sizes[i]` is the length for rank i, `cat_sizes[i]` the length rank i holds of `cat_dim`; all ranks
    pass the same sizes. Differentiable like `redistribute`. With one rank on `axis` x comes back as it is.
    Raises ValueError when x does not have the sizes named.
    """
    parts = axis_sizes(mesh)[axis]
    index = coordinates(mesh)[axis]
    if len(split_sizes) != parts or len(cat_sizes) != parts:
        raise ValueError(
            f"split_sizes={split_sizes} and cat_sizes={cat_sizes} must name the {parts} ranks of {axis!r}. "
            f"Give one size per rank."
        )
    split_dim, cat_dim = split_dim % x.dim(), cat_dim % x.dim()
    wanted = (sum(split_sizes), cat_sizes[index])
    if (x.shape[split_dim], x.shape[cat_dim]) != wanted:
        raise ValueError(
            f"x={tuple(x.shape)} must hold {wanted[0]} along dimension {split_dim} and {wanted[1]} along "
            f"{cat_dim} for the {parts} ranks of {axis!r}. Pass sizes that add up."
        )
    if parts == 1:
        return x
    op = Exchange(group_name(mesh, axis), index, split_dim, tuple(split_sizes), cat_dim, tuple(cat_sizes))
    return apply_linear(x, op)
