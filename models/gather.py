"""How parameters come from rest to use: one bundle for each layer, one for the leaves around the layers."""

from __future__ import annotations

import torch
from torch import Tensor

from usp.mesh import P, Table
from usp.mesh.bundle import Bundle
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
    tree = abstract(cfg)
    bundle = _bundle({name: getattr(tree, name) for name in names}, cfg, table, mesh, dtype)
    return [t for t in bundle([getattr(params, name) for name in names]) if t is not None]


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
