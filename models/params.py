"""The parameter tree: its shapes, names, placements and initial values.

Dimension letters: B batch, S sequence, D model, N query heads, K kv heads, H head size, F feed-forward,
V vocabulary. Weights are [out, in], as in torch.nn.Linear.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from usp.mesh import P, Table, local_slices
from usp.mesh.devices import MeshLike
from usp.models.config import LlamaConfig

Mesh = MeshLike


class Block(NamedTuple):
    """One decoder layer. A leaf that the configuration does not have is None."""

    norm_attn: Any
    wq: Any
    wk: Any
    wv: Any
    wo: Any
    norm_mlp: Any
    w_gate: Any
    w_up: Any
    w_down: Any
    bq: Any = None
    bk: Any = None
    bv: Any = None
    bo: Any = None
    b_gate: Any = None
    b_up: Any = None
    b_down: Any = None
    q_norm: Any = None
    k_norm: Any = None


class Params(NamedTuple):
    """The whole model. `lm_head` is None when it is the embedding."""

    embed: Any
    layers: tuple[Block, ...]
    norm: Any
    lm_head: Any = None


@dataclass(frozen=True)
class Leaf:
    """What a parameter is: global shape, the letters of its dimensions, how it starts."""

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    init: str  # "normal", "ones" or "zeros"


def abstract(cfg: LlamaConfig) -> Params:
    """The parameter tree with a Leaf in each place; everything else about parameters is derived from it."""
    sizes = {
        "V": cfg.vocab_size,
        "D": cfg.hidden_size,
        "F": cfg.intermediate_size,
        "H": cfg.head_dim,
        "NH": cfg.num_heads * cfg.head_dim,
        "KH": cfg.num_kv_heads * cfg.head_dim,
    }

    def leaf(*dims: str, init: str = "normal") -> Leaf:
        return Leaf(tuple(sizes[d] for d in dims), dims, init)

    def bias(present: bool, dim: str) -> Leaf | None:
        return leaf(dim, init="zeros") if present else None

    def norm(dim: str, present: bool = True) -> Leaf | None:
        return leaf(dim, init="ones") if present else None

    block = Block(
        norm_attn=norm("D"),
        wq=leaf("NH", "D"),
        wk=leaf("KH", "D"),
        wv=leaf("KH", "D"),
        wo=leaf("D", "NH"),
        norm_mlp=norm("D"),
        w_gate=leaf("F", "D"),
        w_up=leaf("F", "D"),
        w_down=leaf("D", "F"),
        bq=bias(cfg.qkv_bias, "NH"),
        bk=bias(cfg.qkv_bias, "KH"),
        bv=bias(cfg.qkv_bias, "KH"),
        bo=bias(cfg.o_bias, "D"),
        b_gate=bias(cfg.mlp_bias, "F"),
        b_up=bias(cfg.mlp_bias, "F"),
        b_down=bias(cfg.mlp_bias, "D"),
        q_norm=norm("H", cfg.qk_norm),
        k_norm=norm("H", cfg.qk_norm),
    )
    head = None if cfg.tie_embeddings else leaf("V", "D")
    return Params(leaf("V", "D"), (block,) * cfg.num_layers, norm("D"), head)


def named_leaves(params: Params) -> Iterator[tuple[str, Any]]:
    """(dotted name, leaf) for every leaf that is there, in file order: "embed", "layers.0.wq", ..."""
    yield "embed", params.embed
    for index, block in enumerate(params.layers):
        for name, value in zip(Block._fields, block, strict=True):
            if value is not None:
                yield f"layers.{index}.{name}", value
    yield "norm", params.norm
    if params.lm_head is not None:
        yield "lm_head", params.lm_head


def map_params(fn: Callable[..., Any], params: Params, *others: Params) -> Params:
    """The tree of fn(dotted name, leaf, *leaves of the others); absent leaves stay None."""
    rest = [dict(named_leaves(other)) for other in others]
    done = {name: fn(name, leaf, *(o[name] for o in rest)) for name, leaf in named_leaves(params)}
    layers = tuple(
        Block(*(done.get(f"layers.{index}.{name}") for name in Block._fields))
        for index in range(len(params.layers))
    )
    return Params(done["embed"], layers, done["norm"], done.get("lm_head"))


def leaf_name(dotted: str) -> str:
    """Name in a placement table: the last part of the dotted name."""
    return dotted.rpartition(".")[2]


def spec_of(column: Mapping[str, P], dotted: str, leaf: Leaf, *, table: str) -> P:
    """The spec of one parameter in `Table.rest` or `Table.use`. ValueError when the table lacks it."""
    spec = column.get(leaf_name(dotted))
    if spec is None or len(spec) != len(leaf.shape):
        raise ValueError(
            f"table={table!r} must place parameter {leaf_name(dotted)!r} with dims={leaf.dims}, got {spec}. "
            "Add it to the table's rest and use."
        )
    return spec


def param_specs(cfg: LlamaConfig, table: Table) -> Params:
    """The parameter tree with each leaf's placement at rest."""
    return map_params(lambda name, leaf: spec_of(table.rest, name, leaf, table=table.name), abstract(cfg))


def init(
    cfg: LlamaConfig,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    table: Table | None = None,
    mesh: Mesh | None = None,
    device: torch.device | str = "cpu",
) -> Params:
    """Random parameters; this rank's shards at rest when `table` and `mesh` are given.

    The global values depend on `seed` and the dotted names only, never on the mesh. No communication: each
    rank draws one whole tensor at a time and keeps its part.
    """
    placed = placement(table, mesh)

    def make(name: str, leaf: Leaf) -> torch.Tensor:
        if leaf.init == "normal":
            # the CPU generator looks at the low 32 bits of its seed alone
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            value = torch.randn(leaf.shape, generator=generator) * cfg.init_std
        else:
            value = torch.full(leaf.shape, 1.0 if leaf.init == "ones" else 0.0)
        if placed is not None:
            spec = spec_of(placed[0].rest, name, leaf, table=placed[0].name)
            value = value[local_slices(spec, leaf.shape, placed[1])]
        return value.to(device=device, dtype=dtype, copy=True).contiguous()

    return map_params(make, abstract(cfg))


def placement(table: Table | None, mesh: Mesh | None) -> tuple[Table, Mesh] | None:
    """Both or none of the two. ValueError when only one is given."""
    if (table is None) != (mesh is None):
        missing = "table" if table is None else "mesh"
        raise ValueError(f"{missing}=None must be given together with the other one. Pass both or neither.")
    return None if table is None or mesh is None else (table, mesh)
