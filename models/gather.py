"""How parameters come from rest to use: one bundle for each layer, one for the leaves around the layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from usp.levels import levels, one_gradient
from usp.mesh import P, Table
from usp.mesh.bundle import Bundle
from usp.mesh.linear_late import Journey
from usp.mesh.pending import Pending
from usp.models.config import LlamaConfig
from usp.models.own_heads import use_spec
from usp.models.params import Block, Leaf, Mesh, Params, abstract, spec_of


def layer_bundle(cfg: LlamaConfig, table: Table, mesh: Mesh, dtype: torch.dtype | None) -> Bundle:
    """Moves the leaves of one layer, in the order of `Block`: 1 all-gather, 1 reduce-scatter back."""
    leaves = dict(zip(Block._fields, abstract(cfg).layers[0], strict=True))
    return _bundle(leaves, cfg, table, mesh, dtype)


def in_use(
    params: Params,
    names: tuple[str, ...],
    cfg: LlamaConfig,
    table: Table,
    mesh: Mesh,
    dtype: torch.dtype | None,
) -> list[Tensor]:
    """Leaves around the layers, together: [V@rest, D] -> [V, D]: 1 all-gather, 1 reduce-scatter back."""
    bundle = _around(names, cfg, table, mesh, dtype)
    return [t for t in bundle([getattr(params, name) for name in names]) if t is not None]


class Coming:
    """As `in_use`, for leaves that are used after the layers: they come while the last layers run.

    Made before anything else of the forward, so that its gradients are waited for after everything else of
    the backward. `late`: whether they may travel while the layers' are computed, which holds what is sent,
    every leaf whole, until the last layer's are there. Under nested transforms and torch.compile it is
    `in_use` at `arrive`.
    """

    def __init__(
        self,
        params: Params,
        names: tuple[str, ...],
        cfg: LlamaConfig,
        table: Table,
        mesh: Mesh,
        dtype: torch.dtype | None,
        *,
        late: bool,
    ) -> None:
        self._bundle = _around(names, cfg, table, mesh, dtype)
        self._leaves: list[Tensor] = [getattr(params, name) for name in names]
        self._num_layers = cfg.num_layers
        self._way: tuple[Journey, Tensor] | None = None
        if self._bundle.moving and _one_gradient_at_most(self._leaves):
            self._way = self._bundle.depart(self._leaves, late=late)

    def behind(self, layers: Bundle) -> Bundle | Behind:
        """The layers' bundle, which sends these leaves off behind the last layer's."""
        return layers if self._way is None else Behind(layers, self._way[0], self._num_layers)

    def arrive(self) -> list[Tensor]:
        if self._way is None:
            found = self._bundle(self._leaves)
        else:
            found = self._bundle.arrive(self._leaves, *self._way)
        return [t for t in found if t is not None]


class Behind:
    """The layers' bundle, and a journey that sets out behind the last of the forward's gathers: before, it
    would hold up a layer. The gradients' is over when the first layer's set out: what was sent is let go."""

    def __init__(self, layers: Bundle, journey: Journey, num_layers: int) -> None:
        self._layers, self._journey, self._left = layers, journey, num_layers

    def __call__(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        found = self._layers(tensors)
        self._count()
        return found

    def start(self, tensors: Sequence[Tensor | None]) -> Pending:
        pending = self._layers.start(tensors)
        self._count()
        return pending

    def start_transpose(
        self, grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]
    ) -> Pending:
        if self._journey.back is not None:
            self._journey.back.wait()
        return self._layers.start_transpose(grads, dtypes)

    def _count(self) -> None:
        self._left -= 1
        if not self._left:
            self._journey.start()


def _one_gradient_at_most(leaves: Sequence[Tensor]) -> bool:
    """Whether nothing is under way but one derivative in reverse: what a journey's nodes are made for."""
    if torch.compiler.is_compiling() or (levels() and not one_gradient()):
        return False
    return all(forward_ad.unpack_dual(t).tangent is None for t in leaves)  # type: ignore[no-untyped-call]


def _around(
    names: tuple[str, ...], cfg: LlamaConfig, table: Table, mesh: Mesh, dtype: torch.dtype | None
) -> Bundle:
    tree = abstract(cfg)
    return _bundle({name: getattr(tree, name) for name in names}, cfg, table, mesh, dtype)


def _bundle(
    leaves: dict[str, Leaf | None], cfg: LlamaConfig, table: Table, mesh: Mesh, dtype: torch.dtype | None
) -> Bundle:
    srcs: list[P | None] = []
    dsts: list[P | None] = []
    for name, leaf in leaves.items():
        srcs.append(None if leaf is None else spec_of(table.rest, name, leaf, table=table.name))
        dsts.append(None if leaf is None else use_spec(cfg, table, mesh, name))
    shapes = [None if leaf is None else leaf.shape for leaf in leaves.values()]
    return Bundle(srcs, dsts, mesh, shapes, dtype)
