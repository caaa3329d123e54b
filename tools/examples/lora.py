"""PEFT's LoRA on a model with every sequence cut: train adapters, save them, merge them, export.

    torchrun --nproc-per-node 2 -m usp.tools.examples.lora --model runs/quickstart/model

`runs/lora/adapter` is for PEFT, `runs/lora/merged` for Transformers. On weights in shards: `usp.models.lora`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, TrainingArguments

from usp.models.hf.trainer import SequenceParallelConfig, SequenceParallelTrainer
from usp.tools.examples.docs import docs
from usp.tools.examples.start import ranks


def main(
    *, model: Path, out: Path = Path("runs/lora"), steps: int = 10, ring: int = 1, lr: float = 1e-3
) -> list[float]:
    """Train adapters on questions and answers; returns the loss of each step."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    Flattening: Any = DataCollatorWithFlattening
    rows: Any = [tokenizer(f"{doc.question}\n{doc.answer}") for doc in docs()]
    wanted: Any = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    net: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), wanted)
    ulysses = dist.get_world_size() // ring
    trainer = SequenceParallelTrainer(
        net,
        TrainingArguments(
            output_dir=str(out),
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=lr,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),  # Accelerate sees the ranks of a CPU only so
        ),
        train_dataset=rows,
        data_collator=Flattening(return_flash_attn_kwargs=True),
        sequence_parallel=SequenceParallelConfig(ulysses_size=ulysses, ring_size=ring),
    )
    trainer.train()
    trainer.save_model(str(out / "adapter"))
    if trainer.is_world_process_zero():
        net.merge_and_unload().save_pretrained(out / "merged")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    with ranks():
        losses = tyro.cli(main)
