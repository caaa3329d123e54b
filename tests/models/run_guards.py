"""What one training step makes a device do, counted on the CPU: kernels, copies, waits of the host, bytes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from usp import Batch, adamw_init, adamw_update, global_norm, reduce_grads, shard_batch, value_and_grad
from usp.mesh import TABLES, build_mesh, pending
from usp.mesh.groups import gather_coalesced
from usp.models import LlamaConfig, init, loss, param_specs
from usp.optim import clip_scale

CFG = LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_layers=3, num_heads=8, num_kv_heads=4
)
COPIES = ("copy_", "clone", "_to_copy", "cat", "constant_pad_nd", "index")
ROOM = ("empty", "empty_like", "empty_strided", "new_empty")  # nothing runs
WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique", "masked_select")


class Launches(TorchDispatchMode):
    """Operations that write memory, by name; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if _is_tensor(t)}
        made = [t for t in pytree.tree_leaves(out) if _is_tensor(t)]
        views = all(t.untyped_storage().data_ptr() in given for t in made)
        name = func._overloadpacket.__name__
        if name not in ROOM and (func._schema.is_mutable or not views or name in WAITS):
            self.names[name] += 1
        return out


def _is_tensor(t: Any) -> bool:
    return isinstance(t, torch.Tensor)


def step_of(num_layers: int, **options: Any) -> Callable[[], Any]:
    cfg = replace(CFG, num_layers=num_layers)
    mesh, table = build_mesh(ulysses=2), TABLES["usp"]
    params, specs = init(cfg, seed=1, table=table, mesh=mesh), param_specs(cfg, table)
    state = adamw_init(params)
    shard = shard_batch(Batch(torch.arange(64).reshape(1, 64)), table=table, mesh=mesh)
    loss_and_grads = value_and_grad(lambda p: loss(p, shard, cfg, table=table, mesh=mesh, **options))

    def step() -> Any:
        value, grads = loss_and_grads(params)
        grads = reduce_grads(grads, specs, mesh)
        scale = clip_scale(global_norm(grads, specs, mesh), 1.0)
        adamw_update(params, grads, state, lr=1e-3, grad_scale=scale)
        return value

    return step


def per_layer(options: dict[str, Any]) -> dict[str, Counter[str]]:
    """Of one more layer in a whole step, the difference of two models; and of the smaller whole step."""
    with patch.object(pending, "gather_each", gather_coalesced):  # as on a GPU
        found = [launches_of(step_of(num_layers, **options)) for num_layers in (3, 4)]
    return {"layer": found[1] - found[0], "step": found[0]}


def launches_of(step: Callable[[], Any]) -> Counter[str]:
    """Of a step that is not the first."""
    step()
    with Launches() as launches:
        step()
    return launches.names
