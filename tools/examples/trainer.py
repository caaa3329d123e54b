"""Transformers' Trainer with every sequence cut over the ranks: another class, and one more argument.

    torchrun --nproc-per-node 2 -m usp.tools.examples.trainer --model runs/quickstart/model

Documents are laid end to end without padding, loss and gradients are those of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, TrainingArguments

from usp.models.hf.trainer import SequenceParallelConfig, SequenceParallelTrainer
from usp.tools.examples.docs import docs
from usp.tools.examples.start import ranks


def main(
    *, model: Path, out: Path = Path("runs/trainer"), steps: int = 10, ring: int = 1, lr: float = 1e-4
) -> list[float]:
    """Train on questions and answers; returns the loss of each step."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    Flattening: Any = DataCollatorWithFlattening
    rows: Any = [tokenizer(f"{doc.question}\n{doc.answer}") for doc in docs()]
    ulysses = dist.get_world_size() // ring
    trainer = SequenceParallelTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        TrainingArguments(
            output_dir=str(out),
            max_steps=steps,
            per_device_train_batch_size=4,  # rows of a step: 4 * 2 * dp, however many ranks share them
            gradient_accumulation_steps=2,
            learning_rate=lr,
            logging_steps=1,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),  # Accelerate sees the ranks of a CPU only so
        ),
        train_dataset=rows,
        eval_dataset=rows[:6],
        data_collator=Flattening(return_flash_attn_kwargs=True),
        processing_class=tokenizer,
        sequence_parallel=SequenceParallelConfig(ulysses_size=ulysses, ring_size=ring),
    )
    trainer.train()
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model(str(out / "hf"))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    with ranks():
        losses = tyro.cli(main)
