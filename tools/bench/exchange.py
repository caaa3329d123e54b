"""Attention's exchange alone: q, k, v to the heads and the result back, against all-to-alls of their bytes.

Contenders are timed with an attention that costs nothing, which leaves its result as it finds the memory, in
the order of a kernel's, and hands k, v back as gradients: ours, yunchang's `SeqAllToAll4D`, and what
DeepSpeed wraps around a Transformers attention. Ours is also timed as the model does it with flash-attn 4: q,
k, v, their gradients and the result's are made in the order of the wire, by what must run anyway.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from usp import heads_to_seq, seq_to_heads
from usp.columns import like_columns
from usp.heads import wire, wired_to_heads
from usp.heads_back import heads_to_ranks
from usp.mesh import TABLES, build_mesh
from usp.models import LlamaConfig
from usp.tools.bench.job import Job, Row
from usp.tools.bench.peers import deepspeed
from usp.tools.bench.place import Place
from usp.tools.bench.shape import shape
from usp.tools.bench.timing import Timed, timed

Exchange = Callable[[Tensor, Tensor, Tensor], Tensor]


class Through(torch.autograd.Function):
    """An attention that costs nothing: memory in the order that a kernel's result has, and as gradients what
    it was given."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.empty_like(q, memory_format=torch.contiguous_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        return grads[0], *ctx.saved_tensors


def through(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found: Tensor = Through.apply(q, k, v)  # type: ignore[no-untyped-call]
    return found


def run(job: Job, place: Place) -> None:
    cfg = shape(job.model, job.layers)
    heads = cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads
    mesh = build_mesh(ulysses=place.world)
    for batch, seq_len in product(job.batch_sizes, sorted(job.seq_lens)):
        row = {**job.facts(), "label": f"batch {batch}", "batch": batch, "seq_len": seq_len}

        def randn(num: int, tokens: int, batch: int = batch) -> Tensor:
            return torch.randn(batch, tokens, num, cfg.head_dim, device=place.device, dtype=place.dtype)

        part = seq_len // place.world
        q, k, v = (randn(n, part).requires_grad_() for n in heads)
        try:
            exchange = contender(job.contender, cfg, place, mesh, batch, seq_len)
            o = exchange(q, k, v)
            up = torch.randn_like(o)
            there = timed(lambda: exchange(q, k, v), place.device)  # noqa: B023
            back = timed(lambda: torch.autograd.grad(o, (q, k, v), up, retain_graph=True), place.device)  # noqa: B023
        except ValueError as e:
            place.emit({**row, "error": str(e)})
            continue
        raw = raw_ms(torch.cat([t.detach().flatten() for t in (q, k, v)]), place)
        raw += raw_ms(q.detach().flatten(), place)
        place.emit(row | figures(raw, there, back))
        if job.contender == "usp":
            row["label"] += ", in the model"
            place.emit(
                row | figures(raw, *in_the_model(q.detach(), k.detach(), v.detach(), mesh, seq_len, place))
            )


def figures(raw: float, there: Timed, back: Timed) -> Row:
    return {
        "raw_ms": raw, "forward_ms": there.device, "backward_ms": back.device, "host_ms": there.host,
        "over_raw": (there.device + back.device) / raw / 2,
    }  # fmt: skip


def raw_ms(flat: Tensor, place: Place) -> float:
    """An all-to-all of these bytes, and nothing else."""
    came = torch.empty_like(flat)
    return timed(lambda: dist.all_to_all_single(came, flat), place.device).device


def contender(name: str, cfg: LlamaConfig, place: Place, mesh: Any, batch: int, seq_len: int) -> Exchange:
    """q, k, v [B, S@rank, N, H] -> o [B, S@rank, N, H], there and back around `through`."""
    table = TABLES["ulysses"]
    if name == "usp":

        def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o = through(*seq_to_heads(q, k, v, mesh=mesh, table=table, seq_len=seq_len))
            return heads_to_seq(o, num_heads=cfg.num_heads, mesh=mesh, table=table, seq_len=seq_len)

        return ours
    if name == "yunchang":
        one: Any = importlib.import_module("yunchang.comm.all_to_all").SeqAllToAll4D
        group = dist.group.WORLD

        def yunchang(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            moved = (one.apply(group, t, 2, 1, False) for t in (q, k, v))
            found: Tensor = one.apply(group, through(*moved), 1, 2, False)
            return found

        return yunchang
    return alst(cfg, place, batch, seq_len)


def alst(cfg: LlamaConfig, place: Place, batch: int, seq_len: int) -> Exchange:
    """DeepSpeed's wrapper, its gather of the positions included, as it is in every layer."""
    deepspeed.load(place)

    def inner(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **rest: Any) -> tuple[Tensor, None]:
        return through(*(t.transpose(1, 2) for t in (q, k, v))), None

    wrapper: Any = deepspeed.ulysses().UlyssesSPAttentionHF(
        attn=inner,
        batch_size=batch,
        attn_head_count=cfg.num_heads,
        attn_head_size=cfg.head_dim,
        kv_head_count=cfg.num_kv_heads,
        num_hidden_layers=1,
        process_group=dist.group.WORLD,
        seq_length_is_variable=True,
    )
    module = torch.nn.Module()
    module.num_key_value_groups = cfg.num_heads // cfg.num_kv_heads  # type: ignore[assignment]

    part = seq_len // place.world
    own = (torch.arange(part, device=place.device) + place.rank * part).repeat(batch, 1)

    def exchange(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = (t.transpose(1, 2) for t in (q, k, v))
        found: Tensor = wrapper(module, *first, None, position_ids=own, scaling=cfg.head_dim**-0.5)[0]
        return found.view(q.shape)

    return exchange


def in_the_model(
    q: Tensor, k: Tensor, v: Tensor, mesh: Any, seq_len: int, place: Place
) -> tuple[Timed, Timed]:
    """Forward and backward of our exchanges where the products around them write in the order of the wire."""
    world, where = place.world, {"mesh": mesh, "table": TABLES["ulysses"], "seq_len": seq_len}
    (rows, _, num_heads, size), heads = q.shape, [t.shape[2] // place.world for t in (q, k, v)]
    wired = wire([q, k, v], world).requires_grad_()

    def exchange() -> tuple[list[Tensor], Tensor, Tensor]:
        there = wired_to_heads(wired, [(n, size) for n in heads], **where)
        o = torch.empty_like(there[0], memory_format=torch.contiguous_format).requires_grad_()
        return there, o, heads_to_ranks(o, num_heads=num_heads, **where)

    there, o, back = exchange()
    grads = like_columns([t.flatten(0, 1) for t in there])  # as a kernel lays them
    ups = [g.normal_().view(t.shape) for g, t in zip(grads, there, strict=True)]
    up = torch.randn(world, back.shape[1], rows, back.shape[3], device=q.device, dtype=q.dtype)
    outputs, inputs, given = [*there, back], [wired, o], [*ups, up.permute(2, 1, 0, 3)]
    return (
        timed(exchange, place.device),
        timed(lambda: torch.autograd.grad(outputs, inputs, given, retain_graph=True), place.device),
    )
