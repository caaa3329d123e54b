"""What one rank does in the tests of Transformers models on sequence shards."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.models.batches import two_rows
from tests.models.hf.causal import causal_model
from tests.models.hf.run_bridge import whole
from usp import Batch, unshard_batch
from usp.mesh import TABLES, build_mesh
from usp.models.hf import sequence_parallel


def rows_of(case: str) -> Batch:
    """`two_rows`, or "short": fewer tokens than ranks, one of which has nothing."""
    if case != "short":
        return two_rows(case)
    tokens = two_rows("whole rows").tokens[:, :3]
    return Batch(tokens, tokens, [[0, 1, 3], [0, 3]])


def on_rank(family: str, dp: int, ring: int, ulysses: int, table: str, case: str, remat: bool) -> Any:
    mesh = build_mesh(dp=dp, ring=ring, ulysses=ulysses)
    model = causal_model(family)
    if remat:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    with sequence_parallel(model, mesh=mesh, table=TABLES[table]) as sp:
        shard = sp.shard(rows_of(case))
        loss = sp.loss(shard)
        loss.backward()
        sp.reduce_grads()
        with torch.no_grad():
            logits = unshard_batch(sp(shard).logits, shard, table=sp.table, mesh=mesh)
        fused = sp.fused
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return loss.detach(), grads if dist.get_rank() == 0 else {}, logits, fused


def fsdp_on_rank(family: str, dp: int, ring: int, ulysses: int, table: str, case: str) -> Any:
    """As `on_rank`, weights kept in parts by FSDP2 over all ranks, those that share a sequence too."""
    mesh = build_mesh(dp=dp, ring=ring, ulysses=ulysses)
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    model = causal_model(family)
    with sequence_parallel(model, mesh=mesh, table=TABLES[table], averaged=True) as sp:
        for layer in model.model.layers:
            fully_shard(layer, mesh=everyone)
        fully_shard(model, mesh=everyone)
        shard = sp.shard(rows_of(case))
        loss = sp.loss(shard)
        loss.backward()
        grads = {n: whole(p.grad) for n, p in model.named_parameters()}
        with torch.no_grad():
            logits = unshard_batch(sp(shard).logits, shard, table=sp.table, mesh=mesh)
        fused = sp.fused
    return loss.detach(), grads if dist.get_rank() == 0 else {}, logits, fused


def two_models_on_rank() -> Any:
    """Two models, two meshes, interleaved in one process; and everything as it was afterwards."""
    before = set(ALL_ATTENTION_FUNCTIONS.keys())
    a, b = causal_model("llama"), causal_model("gemma2")
    mesh_a, mesh_b = build_mesh(ulysses=4), build_mesh(dp=2, ring=2)
    with (
        sequence_parallel(a, mesh=mesh_a, table=TABLES["ulysses"]) as sp_a,
        sequence_parallel(b, mesh=mesh_b, table=TABLES["ring"]) as sp_b,
    ):
        names = (a.config._attn_implementation, b.config._attn_implementation)
        loss_a, loss_b = sp_a.loss(sp_a.shard(rows_of("packed"))), sp_b.loss(sp_b.shard(rows_of("packed")))
        loss_a.backward()
        loss_b.backward()
        sp_a.reduce_grads()
        sp_b.reduce_grads()
    after = (a.config._attn_implementation, b.config._attn_implementation)
    left = set(ALL_ATTENTION_FUNCTIONS.keys()) ^ before
    norms = [sum(float(p.grad.square().sum()) for p in m.parameters() if p.grad is not None) for m in (a, b)]
    return loss_a.detach(), loss_b.detach(), norms, names, after, left
