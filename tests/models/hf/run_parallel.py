"""What one rank does in the tests of Transformers models on sequence shards."""

from typing import Any

import torch
import torch.distributed as dist
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.models.batches import two_rows
from tests.models.hf.causal import causal_model
from usp import unshard_batch
from usp.mesh import TABLES, build_mesh
from usp.models.hf import sequence_parallel


def on_rank(family: str, dp: int, ring: int, ulysses: int, table: str, case: str, remat: bool) -> Any:
    mesh = build_mesh(dp=dp, ring=ring, ulysses=ulysses)
    model = causal_model(family)
    if remat:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    with sequence_parallel(model, mesh=mesh, table=TABLES[table]) as sp:
        shard = sp.shard(two_rows(case))
        loss = sp.loss(shard)
        loss.backward()
        sp.reduce_grads()
        with torch.no_grad():
            logits = unshard_batch(sp(shard).logits, shard, table=sp.table, mesh=mesh)
        fused = sp.fused
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
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
        loss_a, loss_b = sp_a.loss(sp_a.shard(two_rows("packed"))), sp_b.loss(sp_b.shard(two_rows("packed")))
        loss_a.backward()
        loss_b.backward()
        sp_a.reduce_grads()
        sp_b.reduce_grads()
    after = (a.config._attn_implementation, b.config._attn_implementation)
    left = set(ALL_ATTENTION_FUNCTIONS.keys()) ^ before
    norms = [sum(float(p.grad.square().sum()) for p in m.parameters() if p.grad is not None) for m in (a, b)]
    return loss_a.detach(), loss_b.detach(), norms, names, after, left
