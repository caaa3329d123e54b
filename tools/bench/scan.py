"""The layer scan against the same blocks called one after the other, forward and backward.

The loop is plain autograd: with `torch.utils.checkpoint` where layers are computed again, and parameters at
rest gathered when their layer comes. Both run the same compiled parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from usp import scan, value_and_grad
from usp.models.block import block
from usp.models.gather import layer_bundle
from usp.models.rope import rope_cos_sin
from usp.tools.bench.job import Job, Row, Setting
from usp.tools.bench.place import Place, kernel_name
from usp.tools.bench.shape import shape
from usp.tools.bench.step import Model
from usp.tools.bench.timing import measure, release


def run(job: Job, place: Place) -> None:
    cfg = shape(job.model, job.layers)
    model = Model(cfg, Setting(label="scan", table="ulysses"), place)
    model.state = None  # type: ignore[assignment]  # no update is made
    for seq_len in sorted(job.seq_lens):
        for remat in ("none", "full"):
            row = {**job.facts(), "label": f"remat={remat}", "seq_len": seq_len}
            try:
                scanned, looped = both(model, job, seq_len, remat)
                found = {}
                for name, step in (("scan", scanned), ("loop", looped)):
                    one = measure(step, steps=job.steps, warmup=2, device=place.device)
                    found[name] = one
                    release(place.device)
                place.emit({**row, **compared(found["scan"], found["loop"])})
            except torch.OutOfMemoryError as e:
                place.emit({**row, "error": f"out of memory: {str(e)[:160]}"})


def compared(scanned: Row, looped: Row) -> Row:
    """Milliseconds of both, of device and host, and memory."""
    found: Row = {"over_loop": scanned["seconds"] / looped["seconds"]}
    for name, row in (("scan", scanned), ("loop", looped)):
        found |= {f"{name}_ms": 1e3 * row["seconds"], f"{name}_host_ms": 1e3 * row["host"]}
        found[f"{name}_peak"] = row["peak"]
    return found


def both(
    model: Model, job: Job, seq_len: int, remat: str
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Steps that give the sum of the last layer's result, after the gradients of it."""
    cfg, place, mesh, table = model.cfg, model.place, model.mesh, model.table
    compiled, kernel = place.device.type == "cuda", kernel_name(job.kernel, cfg, place)
    shard = model.shard(seq_len)
    cos, sin = rope_cos_sin(shard.positions, cfg, place.dtype, seq_len=seq_len)
    x = torch.randn(1, shard.tokens.shape[1], cfg.hidden_size, device=place.device, dtype=place.dtype)
    one = partial(
        block, cfg=cfg, table=table, mesh=mesh, shape=(1, seq_len, cfg.hidden_size), kernel=kernel,
        compiled=compiled,
    )  # fmt: skip
    gather = layer_bundle(cfg, table, mesh, place.dtype)
    layers = model.params.layers
    windows = [cfg.window_of(i) for i in range(cfg.num_layers)]
    each = [{"window": window} for window in windows]
    loss_and_grads = value_and_grad(
        lambda p: (
            scan(one, x, p, cos, sin, shard.cu_seqlens, each=each, remat=remat, gather=gather).float().sum()
        )
    )

    def scanned() -> Tensor:
        found: Tensor = loss_and_grads(layers)[0]
        return found

    leaves, tree = zip(*(pytree.tree_flatten(layer) for layer in layers), strict=True)

    def looped() -> Tensor:
        own = [[t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in flat] for flat in leaves]

        def call(x: Tensor, flat: list[Any], i: int) -> Tensor:
            used = flat if gather is None else gather(flat)
            layer = pytree.tree_unflatten(used, tree[i])
            return one(x, layer, cos, sin, shard.cu_seqlens, window=windows[i])

        y = x.detach().requires_grad_()
        for i, flat in enumerate(own):
            if remat == "none":
                y = call(y, flat, i)
            else:
                y = checkpoint(call, y, flat, i, use_reentrant=False, preserve_rng_state=False)
        total = y.float().sum()
        torch.autograd.grad(total, [t for flat in own for t in flat if isinstance(t, Tensor)])
        return total.detach()

    return scanned, looped
