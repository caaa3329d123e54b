"""What one rank does in the tests with Accelerate, PEFT and functional adapters."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

from tests.models.batches import two_rows
from tests.models.hf.causal import causal_model
from tests.models.hf.run_bridge import inputs_of, whole
from tests.models.hf.run_trainer import as_launched
from usp import Batch, adamw_init, reduce_grads, shard_batch, value_and_grad
from usp.mesh import TABLES, P, build_mesh, redistribute
from usp.models import abstract, from_hf, loss, map_params, param_specs, to_hf
from usp.models.hf import BridgedCausalLM, sequence_parallel
from usp.models.lora import LoraConfig, add_lora, init_lora, load_lora, lora_specs, save_lora

STEPS, RESTART = 5, 3


def batch_of(step: int) -> Batch:
    """Another batch each step."""
    batch = two_rows("packed")
    assert batch.labels is not None
    moved = (batch.tokens + step) % 101
    return batch._replace(tokens=moved, labels=moved.where(batch.labels != -100, -100))


def arguments_of(step: int) -> dict[str, Any]:
    batch = batch_of(step)
    return {**inputs_of("packed"), "input_ids": batch.tokens, "labels": batch.labels}


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def accelerate_on_rank(out: Path, dp: int, ring: int, ulysses: int, table: str, keep_whole: bool) -> Any:
    """A plain Accelerate loop; after some steps the state is saved, spoiled and loaded again."""
    from accelerate import Accelerator

    as_launched()
    mesh = build_mesh(dp=dp, ring=ring, ulysses=ulysses)
    model = BridgedCausalLM.from_pretrained(
        out / "start",
        table=TABLES[table],
        mesh=mesh,
        dtype=torch.float64,
        whole=keep_whole,
        averaged=keep_whole,
    )
    accelerator = Accelerator(cpu=True)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    if keep_whole:
        engine, optimizer = accelerator.prepare(model, optimizer)
    else:  # parameters cut by placement: nothing to wrap, and nothing left to reduce
        engine = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer = accelerator.prepare(optimizer)
    seen = []
    for step in range(STEPS):
        if step == RESTART and keep_whole:
            accelerator.save_state(str(out / "state"))
            accelerator.wait_for_everyone()
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            accelerator.load_state(str(out / "state"))
        value = engine(**arguments_of(step)).loss
        accelerator.backward(value)
        norm = accelerator.clip_grad_norm_(engine.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append((float(value.detach()), float(whole(norm))))
    accelerator.free_memory()
    return seen


def peft_on_rank(out: Path, dp: int, ring: int, ulysses: int, table: str, kind: str) -> Any:
    """LoRA through PEFT: on the bridge, or on an unchanged Transformers model on shards."""
    from peft import get_peft_model

    mesh = build_mesh(dp=dp, ring=ring, ulysses=ulysses)
    if kind == "hf":
        base: Any = causal_model("llama")
    else:
        base = BridgedCausalLM.from_pretrained(
            out / "start", table=TABLES[table], mesh=mesh, dtype=torch.float64, whole=kind == "whole"
        )
    model = randomized(get_peft_model(base, peft_config()))
    if kind == "cut":
        try:
            model(**inputs_of("packed"))
        except ValueError as error:
            return str(error)
    if kind == "hf":
        with sequence_parallel(model, mesh=mesh, table=TABLES[table]) as sp:
            value = sp.loss(sp.shard(two_rows("packed")))
            value.backward()
            sp.reduce_grads()
    else:
        value = model(**inputs_of("packed")).loss
        value.backward()
        base.reduce_grads()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad and p.grad is not None]
    if kind == "whole":
        merged = model.merge_and_unload()
        merged.save_pretrained(out / "merged", is_main_process=dist.get_rank() == 0)
        dist.barrier()
    return value.detach(), grads, frozen


def peft_config() -> Any:
    import peft

    Peft: Any = peft.LoraConfig
    return Peft(
        r=3, lora_alpha=6.0, target_modules=["q_proj", "v_proj", "o_proj", "up_proj"], lora_dropout=0.0
    )


def randomized(model: Any) -> Any:
    """Adapters with values of their own, the same everywhere."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.2
    return model


LORA = LoraConfig(rank=3, alpha=6.0, targets=("wq", "wv", "wo", "w_up"))


def lora_on_rank(out: Path, adapters: Path, dp: int, ring: int, ulysses: int, table: str) -> Any:
    """Adapters on the functional model: loss, gradients, what the optimizer holds, the merged model."""
    mesh, scheme = build_mesh(dp=dp, ring=ring, ulysses=ulysses), TABLES[table]
    cfg, params = from_hf(out / "start", table=scheme, mesh=mesh, dtype=torch.float64)
    tree = load_lora(cfg, LORA, adapters)
    shard = shard_batch(two_rows("packed"), table=scheme, mesh=mesh)

    def objective(tree: Any) -> Tensor:
        full = add_lora(params, tree, cfg, LORA, table=scheme, mesh=mesh)
        return loss(full, shard, cfg, table=scheme, mesh=mesh, remat="full")

    value, grads = value_and_grad(objective)(tree)
    grads = reduce_grads(grads, lora_specs(tree), mesh)
    total = redistribute(value, P(partial=("dp", "ring", "ulysses")), P(), mesh)
    held = sum(t.numel() for t in pytree.tree_leaves(adamw_init(tree).exp_avg))
    full = add_lora(params, tree, cfg, LORA, table=scheme, mesh=mesh)
    to_hf(full, cfg, out / f"merged {table}", table=scheme, mesh=mesh)
    if dist.get_rank() == 0:
        save_lora(tree, LORA, out / f"again {table}")
    dist.barrier()
    specs = param_specs(cfg, scheme)
    cut = map_params(lambda _, value, spec, leaf: value.shape != leaf.shape, params, specs, abstract(cfg))
    fresh = init_lora(cfg, LORA, seed=1, dtype=torch.float64)
    nothing = add_lora(params, fresh, cfg, LORA, table=scheme, mesh=mesh)
    same = torch.equal(nothing.layers[0].wq, params.layers[0].wq)
    return total, {name: tuple(pair) for name, pair in grads.items()}, held, bool(cut.layers[0].wq), same
