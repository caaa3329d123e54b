"""What one rank does in the tests of DeepSpeed."""

import os
import warnings

os.environ.update(DS_ACCELERATOR="cpu")  # before the import, which asks for a GPU

from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from tests.models.hf.causal import causal_model
from tests.models.hf.run_engines import arguments_of
from tests.models.hf.run_trainer import as_launched, curve, make
from usp import attention, heads_to_seq, seq_to_heads
from usp.mesh import TABLES, build_mesh
from usp.models.hf import BridgedCausalLM, sequence_parallel, shard_inputs
from usp.models.hf.deepspeed import deepspeed_engine, whole_parameters
from usp.models.hf.inputs import count_targets

warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)  # torch's, of DeepSpeed
CLIP, LR, EPS = 0.5, 1e-2, 1e-3  # a large eps: a step depends on the size of the gradients
MICRO, STEPS, TRAINED = 2, 2, 2

# Its shared memory collectives would be compiled here; gloo's are what is used anyway.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)


def batches_of(step: int) -> tuple[list[dict[str, Any]], int]:
    """The micro-batches of one step, and the targets of all of them."""
    batches = [arguments_of(MICRO * step + i) for i in range(MICRO)]
    return batches, sum(count_targets(b) for b in batches)


def train(out: Path, stage: int, dp: int, ring: int, ulysses: int, table: str, kind: str) -> Any:
    """Two steps of two micro-batches: losses, norms, the first step's gradients, parameters afterwards."""
    as_launched()
    mesh = build_mesh(dp=dp, ring=ring, ulysses=ulysses)
    placed: dict[str, Any] = {"mesh": mesh, "table": TABLES[table]}
    config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": CLIP,
        "flops_profiler": {"enabled": stage == 0, "profile_step": 1, "output_file": os.devnull},
    }
    if kind == "bridge":
        bridge = BridgedCausalLM.from_pretrained(
            out / "start", dtype=torch.float32, whole=True, averaged=True, **placed
        )
        engine = deepspeed_engine(bridge, config=config, optimizer=optimizer_of(bridge))
        return steps(engine, lambda inputs, count: engine(**inputs, num_items_in_batch=count).loss, out)
    model = causal_model("llama").float()
    with sequence_parallel(model, averaged=True, **placed) as sp:
        engine = deepspeed_engine(sp, config=config, optimizer=optimizer_of(model))

        def loss_of(inputs: Any, count: int) -> Tensor:
            return sp.loss(shard_inputs(inputs, num_valid=count, **placed), engine=engine)

        return steps(engine, loss_of, out)


def steps(engine: Any, loss_of: Any, out: Path) -> Any:
    seen, grads = [], {}
    for step in range(STEPS + 1):
        if step == STEPS:  # one more, and back to where it was
            engine.save_checkpoint(str(out / "state"))
        batches, count = batches_of(step)
        total = 0.0
        for i, inputs in enumerate(batches):
            engine.set_gradient_accumulation_boundary(i == MICRO - 1)
            loss = loss_of(inputs, count)
            total += float(loss.detach())
            engine.backward(loss)
        if step == 0:
            for name, p in engine.module.named_parameters():
                grads[name] = safe_get_full_grad(p).clone()  # type: ignore[union-attr]
        engine.step()
        seen.append((total, engine.get_global_grad_norm()))
    first = dist.get_rank() == 0
    engine.load_checkpoint(str(out / "state"))
    with whole_parameters(engine) as model:
        params = {n: p.detach().clone() for n, p in model.named_parameters()}
        model.save_pretrained(out / "trained", is_main_process=first)
    dist.barrier()
    engine.destroy()
    return seen[:STEPS], (grads if first else {}), (params if first else {})


def trainer_on_rank(out: Path, dp: int, ring: int, ulysses: int, kind: str) -> Any:
    """Transformers' Trainer with ZeRO-3 as its engine."""
    config = {
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
        "gradient_clipping": "auto",
    }
    run = (dp, ring, ulysses, "usp", "padded", kind)
    trainer = make(out, *run, deepspeed=config, max_steps=TRAINED)
    trainer.model.float()
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(str(out / "saved"))
    dist.barrier()
    return curve(trainer), metrics["eval_loss"]


SIZE, SEQ, ROWS = 8, 10, 2


def heads_of(num_heads: int, num_kv_heads: int) -> list[Tensor]:
    """q [B, N, S, H] and k, v [B, K, S, H] as layers of Transformers make them; a gradient of the output."""
    g = torch.Generator().manual_seed(num_kv_heads)
    counts = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    return [torch.randn(ROWS, n, SEQ, SIZE, generator=g, dtype=torch.float64) for n in counts]


def dense(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2), None


def theirs_and_ours(num_heads: int, num_kv_heads: int) -> Any:
    """One attention on two ranks, through DeepSpeed's Ulysses and through ours: outputs and gradients."""
    as_launched()
    deepspeed.init_distributed("gloo")
    mesh = build_mesh(dp=2, ulysses=2)
    group: Any = mesh.get_group("ulysses")
    at = mesh.get_local_rank("ulysses")
    half = SEQ // 2
    q, k, v, upstream = (t[:, :, at * half : (at + 1) * half] for t in heads_of(num_heads, num_kv_heads))
    peer = UlyssesSPAttentionHF(
        attn=dense, batch_size=ROWS, attn_head_count=num_heads, attn_head_size=SIZE,
        kv_head_count=num_kv_heads, num_hidden_layers=1, process_group=group, seq_length_is_variable=True,
    )  # fmt: skip
    positions = torch.arange(at * half, (at + 1) * half).expand(ROWS, -1).contiguous()
    results = []
    for ours in (False, True):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        if ours:
            placed: dict[str, Any] = {"mesh": mesh, "table": TABLES["ulysses"]}
            moved = seq_to_heads(*(t.transpose(1, 2) for t in leaves), seq_len=SEQ, **placed)
            o = heads_to_seq(attention(*moved, **placed), num_heads=num_heads, seq_len=SEQ, **placed)
        else:
            o = peer(nn.Identity(), *leaves, None, position_ids=positions)[0].unflatten(2, (num_heads, SIZE))
        grads = torch.autograd.grad(o, leaves, upstream.transpose(1, 2))
        results.append([o.detach().transpose(1, 2), *grads])
    return at, *results
