"""`Zero1`: parameters whole on every rank, optimizer state cut over the ranks that hold copies.

ZeRO's first stage (Rajbhandari et al., arXiv 1910.02054), by placement: the cut is one more spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from usp.mesh import MeshLike, P, axis_sizes, redistribute
from usp.mesh.bundle import Bundle
from usp.optim import AdamWState, adamw_update


class Zero1:
    """`specs`: how parameters are placed at rest; `like`: a tree of the same structure whose leaves have the
    global `.shape`, such as `usp.models.abstract(cfg)`.

    One step: `grads = zero1.reduce_grads(grads)`, `clip_by_global_norm(grads, zero1.specs, mesh, ...)`, then
    `zero1.update(...)` with a state made by `adamw_init(zero1.slices(params))`.
    """

    def __init__(self, specs: Any, like: Any, mesh: MeshLike) -> None:
        placed, self._tree = pytree.tree_flatten(specs)
        shapes = [None if leaf is None else tuple(leaf.shape) for leaf in self._tree.flatten_up_to(like)]
        axes = tuple(axis_sizes(mesh))
        cut = [None if spec is None else _cut(spec, axes) for spec in placed]
        self.specs = pytree.tree_unflatten(cut, self._tree)
        """How gradients and optimizer state are placed."""
        self._placed, self._cut, self._shapes, self._mesh = placed, cut, shapes, mesh
        self._bundle = Bundle(cut, placed, mesh, shapes)

    def slices(self, params: Any) -> Any:
        """This rank's part of every parameter, in memory of its own. Does not communicate."""
        out: list[Tensor | None] = []
        leaves = zip(self._leaves(params), self._placed, self._cut, self._shapes, strict=True)
        for leaf, spec, cut, shape in leaves:
            if leaf is not None:
                own = redistribute(leaf.detach(), spec, cut, self._mesh, shape=shape)
                leaf = own.clone() if own.data_ptr() == leaf.data_ptr() else own
            out.append(leaf)
        return pytree.tree_unflatten(out, self._tree)

    def reduce_grads(self, grads: Any) -> Any:
        """This rank's part of every gradient, summed over the copies' contributions: 1 reduce-scatter for all
        leaves of one placement, in float32 or wider."""
        leaves = self._leaves(grads)
        dtypes = [None if g is None else g.dtype for g in leaves]
        return pytree.tree_unflatten(self._bundle.start_transpose(leaves, dtypes).wait(), self._tree)

    def update(self, params: Any, grads: Any, state: AdamWState, **adamw: Any) -> tuple[Any, AdamWState]:
        """`adamw_update` on this rank's part, then the whole parameters, written over `params`: 1 all-gather
        for all leaves of one placement. `grads` and `state` placed by `specs`."""
        own, state = adamw_update(self.slices(params), grads, state, **adamw)
        whole = self._bundle.start(self._leaves(own)).wait()
        for old, new in zip(self._leaves(params), whole, strict=True):
            if old is not None and new is not None:
                old.detach().copy_(new)
        return params, state

    def _leaves(self, tree: Any) -> Sequence[Any]:
        return self._tree.flatten_up_to(tree)


def _cut(spec: P, axes: tuple[str, ...]) -> P:
    """`spec` with the axes that it leaves out added to the dimension that it cuts, or to the first."""
    if not len(spec):
        raise ValueError(f"spec={spec} must have a dimension to cut, got a scalar. Use shape (1,).")
    dim = next((d for d, cut in enumerate(spec.dims) if cut), 0)
    more = tuple(axis for axis in axes if axis not in spec.axes)
    return P(*(cut + more if d == dim else cut for d, cut in enumerate(spec.dims)))
