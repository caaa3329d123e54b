"""Every rule that needs a configuration, a mesh and a table together."""

from __future__ import annotations

from usp.heads import trading_axis
from usp.mesh import P, Table, axis_sizes
from usp.models.config import LlamaConfig
from usp.models.params import Mesh, abstract, named_leaves, spec_of
from usp.order import ring_axes

# Parameters that act on whole rows, on each token alike: in use they must be whole on every rank.
_WHOLE = ("embed", "lm_head", "norm", "norm_attn", "norm_mlp", "q_norm", "k_norm", "bo", "b_down")
# (first, second): the output dimension of the first is contracted by the second
_CHAINED = (("wq", "wo"), ("w_gate", "w_down"))
_ALIKE = (
    ("wq", "wk"),
    ("wq", "bq"),
    ("wk", "wv"),
    ("wk", "bk"),
    ("wv", "bv"),
    ("w_gate", "w_up"),
    ("w_gate", "b_gate"),
)


def linear_out(x: P, weight: P) -> P:
    """Placement of x @ weight.T, x [..., in], weight [out, in]; a sharded contraction gives a partial sum."""
    assert x.dims[-1] == weight[1], (x, weight)
    return P(*x.dims[:-1], weight[0], partial=x.partial + weight[1])


def check_layout(cfg: LlamaConfig, *, mesh: Mesh, table: Table, seq_len: int | None = None) -> None:
    """Raise one ValueError that names everything this table cannot place for this model on this mesh.

    Needs no process group and does not communicate: call it before any work. `seq_len`: global tokens a row.
    """
    sizes = axis_sizes(mesh)
    problems = _table_problems(cfg, table, sizes) or _chain_problems(table, sizes)
    problems += [] if problems else _ring_problems(table, sizes)
    if seq_len is not None and seq_len < 1:
        problems.append(f"seq_len={seq_len} must be at least 1. Give at least one token")
    if problems:
        raise ValueError(f"table={table.name!r} must fit the model and mesh={sizes}: {'; '.join(problems)}.")


def _table_problems(cfg: LlamaConfig, table: Table, sizes: dict[str, int]) -> list[str]:
    problems = []
    for name in ("tokens", "residual", "attn_x", "q", "kv", "mlp_x"):
        spec: P = getattr(table, name)
        unknown = sorted(spec.axes - sizes.keys())
        if unknown:
            problems.append(f"{name}={spec} must use axes of the mesh, got {unknown}. Correct the table")
        if name in ("residual", "attn_x", "mlp_x") and spec[2]:
            problems.append(f"{name}={spec} must keep D whole. Shard B or S instead")
    for dotted, leaf in named_leaves(abstract(cfg)):
        if dotted.startswith("layers.") and not dotted.startswith("layers.0."):
            continue
        spec_of(table.rest, dotted, leaf, table=table.name)
        use = spec_of(table.use, dotted, leaf, table=table.name)
        name = dotted.rpartition(".")[2]
        if name in _WHOLE and use.axes:
            problems.append(f"use[{name!r}]={use} must be replicated. Shard it at rest only")
    for first, second in _CHAINED:
        if table.use[first][0] != table.use[second][1]:
            problems.append(f"use[{second!r}] must shard its input as use[{first!r}] shards its output")
        if table.use[first][1]:
            problems.append(f"use[{first!r}]={table.use[first]} must keep D whole. Shard its output instead")
        if table.use[second][0]:
            problems.append(f"use[{second!r}]={table.use[second]} must keep D whole. Shard its input instead")
    present = {dotted.rpartition(".")[2] for dotted, _ in named_leaves(abstract(cfg))}
    for first, second in _ALIKE:
        if second in present and table.use[first][0] != table.use[second][0]:
            problems.append(f"use[{second!r}] must shard its output as use[{first!r}] does")
    return problems


def _chain_problems(table: Table, sizes: dict[str, int]) -> list[str]:
    """Moves that the forward would refuse, and columns that must agree as one batch runs through them."""
    problems = []
    for name in ("residual", "attn_x", "q", "mlp_x"):
        spec: P = getattr(table, name)
        if spec[0] != table.tokens[0]:
            problems.append(f"{name}={spec} must shard B as tokens={table.tokens} does. Correct the table")
    if table.kv != table.q:
        problems.append(f"kv={table.kv} must be placed as q={table.q}. kv heads follow the query heads")
    if table.q[3]:
        problems.append(f"q={table.q} must keep H whole. Shard the heads instead")
    for x, first, second in (("attn_x", "wq", "wo"), ("mlp_x", "w_gate", "w_down")):
        try:
            linear_out(linear_out(getattr(table, x), table.use[first]), table.use[second])
        except ValueError as error:
            problems.append(
                f"{x}={getattr(table, x)} and use[{first!r}]={table.use[first]} must not share axes: {error}"
            )
    try:
        trading_axis(table, sizes)
    except ValueError as error:
        problems.append(str(error))
    return [problem.rstrip(".") for problem in problems]


def _ring_problems(table: Table, sizes: dict[str, int]) -> list[str]:
    """A ring needs its axis outermost on the sequence everywhere, as the order of the tokens follows it."""
    ring = ring_axes(table, sizes)
    if not ring:
        return []
    problems = []
    if len(ring) > 1:
        problems.append(f"q={table.q} must leave one axis larger than 1 on the sequence, got {ring}")
    for name in ("tokens", "residual", "attn_x", "mlp_x"):
        spec: P = getattr(table, name)
        real = tuple(a for a in spec[1] if sizes[a] > 1)
        if real[: len(ring)] != ring:
            problems.append(f"{name}={spec} must shard S over {ring} outermost, as q={table.q} does")
    return problems
