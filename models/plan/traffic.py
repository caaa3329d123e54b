"""What one rank sends in a step, counted from the tables: no tensors, no processes.

Bytes are those that leave the rank, as `usp.mesh.plan.Step.nbytes` counts them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Unpack

import torch

from usp.mesh import P, Table, dual, plan
from usp.mesh.collectives import sum_dtype
from usp.mesh.plan import COMMUNICATES
from usp.mesh.spec import Axes
from usp.models.config import LlamaConfig
from usp.models.embedding import WHOLE, pending_sum, rows_stay
from usp.models.layout import linear_out
from usp.models.options import Options
from usp.models.params import Block, Leaf, abstract, named_leaves, spec_of
from usp.models.plan.local import Local, local
from usp.models.plan.routes import routes, stages
from usp.models.plan.segments import segments
from usp.models.plan.traffic_attention import attention_backward, attention_forward
from usp.models.plan.traffic_kinds import Traffic

BEFORE = "x before attention"


class Passes(NamedTuple):
    """What is sent in the forward and in the backward, each in order."""

    forward: tuple[Traffic, ...]
    backward: tuple[Traffic, ...]


class ModelTraffic(NamedTuple):
    """A whole step of one rank.

    layers: each layer; a backward holds what is run again for it. around: embedding, final norm and head.
    update: gradients of replicated parameters, and the norm.
    """

    layers: tuple[Passes, ...]
    around: Passes
    update: tuple[Traffic, ...]

    @property
    def forward(self) -> tuple[Traffic, ...]:
        return (*(t for layer in self.layers for t in layer.forward), *self.around.forward)

    @property
    def backward(self) -> tuple[Traffic, ...]:
        return (*(t for layer in self.layers for t in layer.backward), *self.around.backward)


def model_traffic(
    cfg: LlamaConfig,
    table: Table,
    sizes: Mapping[str, int],
    *,
    batch: int,
    seq_len: int,
    at: Mapping[str, int] | None = None,
    rest: torch.dtype = torch.float32,
    **options: Unpack[Options],
) -> ModelTraffic:
    """What the rank at coordinates `at` (else the first) sends in one step of `usp.models.loss`.

    Ranks differ where heads are dealt unevenly. `batch` rows of `seq_len` tokens in all; `rest`: type of the
    parameters between uses; `options` as for the model. Whether a ring gathers is decided as it is there.
    Raises ValueError for head_chunks that the model would refuse.
    """
    where = local(cfg, table, sizes, batch=batch, seq_len=seq_len, at=at)
    dtype = options.get("dtype") or rest
    chunks, group = options.get("head_chunks", 1), options.get("group", 1)
    layers: list[Passes] = []
    for remat, start, stop in segments(options.get("remat", "none"), cfg.num_layers):
        alone, grouped = (_layer(where, dtype, remat, chunks, again) for again in (1, 2))
        last = [n % group == group - 1 or n == stop - start - 1 for n in range(stop - start)]
        layers += [alone if one or remat == "none" else grouped for one in last]
    return ModelTraffic(tuple(layers), _around_layers(where, dtype), _update(where, rest))


def _layer(where: Local, dtype: torch.dtype, remat: str, chunks: int, again: int) -> Passes:
    """`again`: how often it is run in the backward, unless remat="none": twice inside a group."""
    leaves = dict(zip(Block._fields, abstract(where.cfg).layers[0], strict=True))
    gathered, scattered = _bundle("layer", leaves, where, dtype)
    before, after = _around_attention(where, dtype), _around_mlp(where, dtype)
    attend = attention_forward(where, dtype, chunks)
    rerun: tuple[Traffic, ...] = ()
    for bare in [True, False][-again:] if remat != "none" else ():
        moved, kept = before.forward, attend
        if remat == "attention":
            kept = attention_forward(where, dtype, chunks, replayed=True, bare=bare)
            if bare and chunks == 1:  # nothing is projected
                moved = tuple(t for t in moved if t.what != BEFORE)
        rerun += (*gathered, *moved, *kept, *after.forward)
    back = (*after.backward, *attention_backward(where, dtype, chunks), *before.backward, *scattered)
    return Passes((*gathered, *before.forward, *attend, *after.forward), (*rerun, *back))


def _shape(where: Local) -> tuple[int, int, int]:
    return where.batch, where.seq_len, where.cfg.hidden_size


def _moved(
    what: str, src: P, dst: P, where: Local, dtype: torch.dtype, reduce_dtype: torch.dtype | None = None
) -> Passes:
    """One `redistribute` of [B, S, D] and its transpose."""

    def steps(src: P, dst: P) -> tuple[Traffic, ...]:
        shape = _shape(where)[: len(src)]
        found = plan(src, dst, shape, dtype, where.sizes, reduce_dtype=reduce_dtype).steps
        return tuple(Traffic(what, s.kind, (s.axis,), 1, s.nbytes) for s in found if s.kind in COMMUNICATES)

    if src == dst:
        return Passes((), ())
    back = steps(dual(dst, where.sizes), dual(src, where.sizes)) if dtype.is_floating_point else ()
    return Passes(steps(src, dst), back)


def _joined(*parts: Passes) -> Passes:
    """One after the other; the backward in reverse."""
    forward = tuple(t for part in parts for t in part.forward)
    return Passes(forward, tuple(t for part in reversed(parts) for t in part.backward))


def _linear(x: P, first: str, second: str, table: Table) -> P:
    return linear_out(linear_out(x, table.use[first]), table.use[second])


def _around_attention(where: Local, dtype: torch.dtype) -> Passes:
    table = where.table
    out = _linear(table.attn_x, "wq", "wo", table)
    return _joined(
        _moved(BEFORE, table.residual, table.attn_x, where, dtype),
        _moved("x after attention", out, table.residual, where, dtype),
    )


def _around_mlp(where: Local, dtype: torch.dtype) -> Passes:
    table = where.table
    out = _linear(table.mlp_x, "w_gate", "w_down", table)
    return _joined(
        _moved("x before the MLP", table.residual, table.mlp_x, where, dtype),
        _moved("x after the MLP", out, table.residual, where, dtype),
    )


def _around_layers(where: Local, dtype: torch.dtype) -> Passes:
    table, tree = where.table, abstract(where.cfg)
    tokens = P(*table.tokens.dims, None)
    names = ("norm",) if tree.lm_head is None else ("norm", "lm_head")
    if rows_stay(where.cfg, table, where.sizes, where.batch * where.seq_len, dtype):
        embedding = [
            _moved("tokens", table.tokens, WHOLE, where, torch.int64),
            _moved("embedded x", pending_sum(table), table.residual, where, dtype, dtype),
        ]
    else:
        embedding = [
            _bundle("embedding", {"embed": tree.embed}, where, dtype),
            _moved("embedded x", tokens, table.residual, where, dtype),
        ]
    parts = [
        *embedding,
        _moved("positions", table.tokens, P(*table.attn_x.dims[:2]), where, torch.int64),
        _bundle("norm and head", {name: getattr(tree, name) for name in names}, where, dtype),
        _moved("final x", table.residual, tokens, where, dtype),
    ]
    return _joined(*parts)


def _update(where: Local, rest: torch.dtype) -> tuple[Traffic, ...]:
    """`reduce_grads` and the all-reduces of the norm."""
    sizes, total = where.sizes, P(partial=tuple(where.sizes))
    found = []
    for name, leaf in named_leaves(abstract(where.cfg)):
        spec = spec_of(where.table.rest, name, leaf, table=where.table.name)
        steps = plan(dual(spec, sizes), spec, leaf.shape, rest, sizes).steps
        found += [Traffic(f"gradient of {name}", s.kind, (s.axis,), 1, s.nbytes) for s in steps]
    wide = torch.promote_types(rest, torch.float32)
    norm = plan(total, P(), (), wide, sizes).steps
    found += [Traffic("norm", s.kind, (s.axis,), 1, s.nbytes) for s in norm]
    return tuple(t for t in found if t.kind in COMMUNICATES)


def _bundle(what: str, leaves: Mapping[str, Leaf | None], where: Local, dtype: torch.dtype) -> Passes:
    """Gathers of the leaves from rest to use, and the sums of their gradients back: see `Bundle`."""
    gathers: list[Traffic] = []
    scatters: list[Traffic] = []
    found, sizes = routes(leaves, where), where.sizes
    for axes, slots in found.together.items():
        num = sum(slot.padded for slot in slots)
        gathers += _gather(what, axes, num * dtype.itemsize, sizes)
        scatters += _scatter(what, axes, num * sum_dtype(dtype).itemsize, sizes)
    for src, dst, shape in found.alone:
        there = plan(src, dst, shape, dtype, sizes).steps
        back = plan(dual(dst, sizes), dual(src, sizes), shape, sum_dtype(dtype), sizes).steps
        for into, steps in ((gathers, there), (scatters, back)):
            into += [Traffic(what, s.kind, (s.axis,), 1, s.nbytes) for s in steps if s.kind in COMMUNICATES]
    return Passes(tuple(gathers), tuple(scatters))


def _gather(what: str, axes: Axes, nbytes: int, sizes: Mapping[str, int]) -> Sequence[Traffic]:
    found = []
    for stage in reversed(stages(axes, sizes)):
        parts = math.prod(sizes[a] for a in stage)
        found.append(Traffic(what, "all_gather", stage, 1, nbytes * (parts - 1)))
        nbytes *= parts
    return found


def _scatter(what: str, axes: Axes, nbytes: int, sizes: Mapping[str, int]) -> Sequence[Traffic]:
    """The mirror of `_gather`, in the other order."""
    return [t._replace(kind="reduce_scatter") for t in reversed(_gather(what, axes, nbytes, sizes))]
