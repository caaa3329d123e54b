"""One small training run by every entry point there is, each returning its losses and gradient norms.

A small Llama with SmolLM2's heads (9 for queries, 3 for keys) and tied embeddings, rows of unlike lengths in
one order, two micro-batches a step, prompts that are no targets, AdamW, clipping, a falling rate, float32 on
the CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from usp import adamw_init, adamw_update, clip_by_global_norm, models, reduce_grads, value_and_grad
from usp.accumulate import accumulate
from usp.mesh import TABLES, build_mesh
from usp.models.hf import BridgedCausalLM, sequence_parallel, shard_inputs
from usp.models.hf.inputs import count_targets
from usp.tools.examples.docs import docs

STEPS, PARTS, ROWS, LR, CLIP = 20, 2, 4, 3e-3, 1.0
Sizes = dict[str, int]
MESHES: dict[str, Sizes] = {"ulysses 2": {"ring": 1, "ulysses": 2}, "ring 2": {"ring": 2, "ulysses": 1}}
Curve = list[tuple[float, float]]
"""Loss and gradient norm before clipping of each step."""
Inputs = dict[str, torch.Tensor]


def rows() -> list[dict[str, Any]]:
    """Documents of up to 120 bytes; the question is no target."""
    made = []
    for doc in docs(PARTS * ROWS * 6):
        prompt, tokens = len(doc.question), list(f"{doc.question}\n{doc.answer}".encode())[:120]
        mask = [int(at >= prompt) for at in range(len(tokens))]
        labels = [token if kept else -100 for token, kept in zip(tokens, mask, strict=True)]
        made.append({"input_ids": tokens, "labels": labels})
    return made


def padded(examples: list[dict[str, Any]]) -> Inputs:
    length = max(len(example["input_ids"]) for example in examples)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    whole = [{**e, "attention_mask": [1] * len(e["input_ids"])} for e in examples]
    return {k: torch.tensor([e[k] + [v] * (length - len(e[k])) for e in whole]) for k, v in fill.items()}


def steps() -> Iterator[tuple[float, list[Inputs], int]]:
    """What the Trainer reads in each step: learning rate, micro-batches, targets."""
    data, size = rows(), PARTS * ROWS
    for step in range(STEPS):
        first = step * size % len(data)
        parts = [padded(data[first + i * ROWS :][:ROWS]) for i in range(PARTS)]
        yield LR * (1 - step / STEPS), parts, sum(count_targets(part) for part in parts)


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=72, intermediate_size=192, num_hidden_layers=3, head_dim=8,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True, pad_token_id=0,
        max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def plain(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def placement(sizes: Sizes) -> dict[str, Any]:
    mesh = build_mesh(ring=sizes["ring"], ulysses=sizes["ulysses"])
    return {"table": TABLES["usp"], "mesh": mesh}


def bridged(model: Path, sizes: Sizes, *, averaged: bool = False) -> Any:
    return BridgedCausalLM.from_pretrained(
        model, dtype=torch.float32, whole=True, averaged=averaged, **placement(sizes)
    )


def arguments(out: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(out), "max_steps": STEPS, "per_device_train_batch_size": ROWS, "learning_rate": LR,
        "gradient_accumulation_steps": PARTS, "max_grad_norm": CLIP, "train_sampling_strategy": "sequential",
        "logging_steps": 1, "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "log_level": "error", **more,
    }  # fmt: skip


def run(trainer: Any) -> Curve:
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(float(entry["loss"]), float(entry["grad_norm"])) for entry in logged]


def references(model: Path, out: Path) -> dict[str, Curve]:
    """Transformers' own Trainer on one process, and again with sums in another order: what rounding does."""
    from transformers import Trainer, TrainingArguments

    once = {"per_device_train_batch_size": PARTS * ROWS, "gradient_accumulation_steps": 1}
    kinds: dict[str, dict[str, Any]] = {"Trainer, one process": {}, "Trainer, one process, no parts": once}
    data: dict[str, Any] = {"train_dataset": rows(), "data_collator": padded}
    return {
        name: run(Trainer(plain(model), TrainingArguments(**arguments(out, **more)), **data))
        for name, more in kinds.items()
    }


def trainer(model: Path, out: Path, sizes: Sizes, net: Any = None) -> Curve:
    from transformers import TrainingArguments

    from usp.models.hf.trainer import SequenceParallelConfig, SequenceParallelTrainer

    config = SequenceParallelConfig(ulysses_size=sizes["ulysses"], ring_size=sizes["ring"])
    data: dict[str, Any] = {"train_dataset": rows(), "data_collator": padded}
    made = plain(model) if net is None else net
    args = TrainingArguments(**arguments(out))
    return run(SequenceParallelTrainer(made, args, **data, sequence_parallel=config))


def bridged_trainer(model: Path, out: Path, sizes: Sizes) -> Curve:
    return trainer(model, out, sizes, bridged(model, sizes))


def sft(model: Path, out: Path, sizes: Sizes) -> Curve:
    """Padding-free: a micro-batch is one row of documents."""
    import datasets  # type: ignore[import-untyped]
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast
    from trl.trainer.sft_config import SFTConfig

    from usp.models.hf.sft import SequenceParallelSFTTrainer
    from usp.models.hf.trainer import SequenceParallelConfig

    datasets.disable_progress_bars()
    Fast: Any = PreTrainedTokenizerFast
    words = Tokenizer(kinds.WordLevel({"<e>": 0}, unk_token="<e>"))
    unused = Fast(tokenizer_object=words, eos_token="<e>", pad_token="<e>")
    return run(
        SequenceParallelSFTTrainer(
            plain(model),
            SFTConfig(**arguments(out, padding_free=True, max_length=None, gradient_checkpointing=False)),
            train_dataset=datasets.Dataset.from_list(rows()),
            processing_class=unused,
            sequence_parallel=SequenceParallelConfig(ulysses_size=sizes["ulysses"], ring_size=sizes["ring"]),
        )
    )


def functional(model: Path, out: Path, sizes: Sizes) -> Curve:
    """Parameters cut over both ranks; no module anywhere."""
    placed = placement(sizes)
    cfg, params = models.from_hf(model, dtype=torch.float32, **placed)
    specs, state, curve = models.param_specs(cfg, placed["table"]), adamw_init(params), Curve()
    loss_and_grads = value_and_grad(lambda p, shard: models.loss(p, shard, cfg, **placed))
    for lr, parts, _ in steps():
        loss, grads = accumulate(loss_and_grads, params, [shard_inputs(part, **placed) for part in parts])
        dist.all_reduce(loss)
        grads = reduce_grads(grads, specs, placed["mesh"])
        grads, norm = clip_by_global_norm(grads, specs, placed["mesh"], CLIP)
        params, state = adamw_update(params, grads, state, lr=lr, betas=(0.9, 0.999))
        curve.append((float(loss), float(norm)))
    return curve


def own_loop(model: Path, out: Path, sizes: Sizes) -> Curve:
    """Transformers' model on shards, and plain torch around it."""
    net, curve = plain(model), Curve()
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.0)
    with sequence_parallel(net, **placement(sizes)) as sp:
        for lr, parts, count in steps():
            total = 0.0
            for part in parts:
                loss: Any = sp.loss(sp.shard(part, num_valid=count))
                loss.backward()
                total += float(loss.detach())
            sp.reduce_grads()
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            update(optimizer, lr)
            curve.append((total, float(norm)))
    return curve


def accelerate(model: Path, out: Path, sizes: Sizes) -> Curve:
    from accelerate import Accelerator

    accelerator: Any = Accelerator(cpu=True)
    net, curve = bridged(model, sizes, averaged=True), Curve()
    engine, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), weight_decay=0.0))
    for lr, parts, count in steps():
        total = 0.0
        for part in parts:
            with nullcontext() if part is parts[-1] else accelerator.no_sync(engine):
                loss = engine(**part, num_items_in_batch=count).loss
                accelerator.backward(loss)
                total += float(loss.detach())
        norm = accelerator.clip_grad_norm_(engine.parameters(), CLIP)
        update(optimizer, lr)
        curve.append((total, float(norm)))
    return curve


def update(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


def deepspeed(model: Path, out: Path, sizes: Sizes, stage: int = 2) -> Curve:
    from usp.models.hf.deepspeed import deepspeed_engine

    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = (
        False  # or it compiles
    )
    net, curve = bridged(model, sizes, averaged=True), Curve()
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": CLIP}
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.0)
    engine = deepspeed_engine(net, config=config, optimizer=optimizer)
    for lr, parts, count in steps():
        total = 0.0
        for part in parts:
            engine.set_gradient_accumulation_boundary(part is parts[-1])
            loss = engine(**part, num_items_in_batch=count).loss
            engine.backward(loss)
            total += float(loss.detach())
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        engine.step()
        curve.append((total, float(engine.get_global_grad_norm())))
    engine.destroy()
    return curve


ENTRIES: dict[str, Callable[[Path, Path, Sizes], Curve]] = {
    "functional loop": functional,
    "model as it is, own loop": own_loop,
    "Trainer": trainer,
    "Trainer, bridged model": bridged_trainer,
    "SFTTrainer, padding-free": sft,
    "Accelerate": accelerate,
}
if find_spec("deepspeed"):
    ENTRIES |= {"DeepSpeed ZeRO-2": deepspeed, "DeepSpeed ZeRO-3": partial(deepspeed, stage=3)}
