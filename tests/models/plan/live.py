"""A whole training step on tensors without data, and the bytes that live at its peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from usp import (
    Batch,
    Shard,
    adamw_init,
    adamw_update,
    global_norm,
    models,
    reduce_grads,
    shard_batch,
    value_and_grad,
)
from usp.accumulate import accumulate
from usp.arena import Arena
from usp.mesh import TABLES, build_mesh, local_shape
from usp.mesh.bundle import stages_of
from usp.optim import clip_scale


class Live(TorchDispatchMode):
    """Counts every storage from the operator that made it until nobody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}
        self.ignoring = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                self._add(t.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = 0 if self.ignoring else storage.nbytes()
            self.now += self.sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


class HostArena(Arena):
    """Its buffers are not the device's."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self.live = live

    def make(self, nbytes: int, *, locked: bool) -> Tensor:
        self.live.ignoring = True
        buffer = super().make(nbytes, locked=locked)
        self.live.ignoring = False
        return buffer


def with_data(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` on real tensors: it reads the ranks of a mesh."""

    def call(*args: Any) -> Any:
        with _disable_current_modes():
            return fn(*args)

    return call


def step_peak(
    cfg: models.LlamaConfig,
    table_name: str,
    degrees: dict[str, int],
    seq_len: int,
    parts: int = 1,
    rows: int = 1,
    **options: Any,
) -> tuple[int, int]:
    """Device bytes at the peak, and host bytes, of the first rank's step in bfloat16 over float32."""
    world = degrees["dp"] * degrees["ring"] * degrees["ulysses"]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        mesh, table = build_mesh(device_type="cpu", **degrees), TABLES[table_name]
        batch = Batch(torch.zeros(degrees["dp"] * rows, seq_len, dtype=torch.int64))
        shard = shard_batch(batch, table=table, mesh=mesh)
        specs, live = models.param_specs(cfg, table), Live()
        real = patch("usp.mesh.bundle.stages_of", with_data(stages_of))
        with real, FakeTensorMode(allow_non_fake_inputs=True), live:
            arena = HostArena(live) if options.get("offload") == "host" else None
            params = models.map_params(
                lambda _, leaf, spec: torch.empty(local_shape(spec, leaf.shape, mesh)),
                models.abstract(cfg), specs,
            )  # fmt: skip
            state = adamw_init(params)
            fields = ("tokens", "labels", "positions", "num_valid")
            shard = shard._replace(**{name: torch.empty_like(getattr(shard, name)) for name in fields})

            def objective(p: Any, shard: Shard) -> Tensor:
                return models.loss(
                    p, shard, cfg, table=table, mesh=mesh, dtype=torch.bfloat16, arena=arena, **options
                )

            _, grads = accumulate(value_and_grad(objective), params, [shard] * parts)
            grads = reduce_grads(grads, specs, mesh)
            scale = clip_scale(global_norm(grads, specs, mesh), 1.0)
            adamw_update(params, grads, state, lr=1e-5, grad_scale=scale)
        return live.peak, 0 if arena is None else arena.nbytes
    finally:
        dist.destroy_process_group()
