"""TRL's SFTTrainer with every sequence cut over the ranks: packed rows, loss on what the assistant says.

    torchrun --nproc-per-node 2 -m usp.tools.examples.sft --model runs/quickstart/model

Conversations share a row without seeing each other. Templates, masks and packing are TRL's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from datasets import Dataset  # type: ignore[import-untyped]
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.sft_config import SFTConfig

from usp.models.hf.sft import SequenceParallelSFTTrainer
from usp.models.hf.trainer import SequenceParallelConfig
from usp.tools.examples.docs import CHAT_TEMPLATE, docs
from usp.tools.examples.start import ranks


def main(*, model: Path, out: Path = Path("runs/sft"), steps: int = 10, ring: int = 1) -> list[float]:
    """Train on short conversations; returns the loss of each step."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT_TEMPLATE  # marks what the assistant says, as assistant_only_loss needs
    chats = [[("user", doc.question), ("assistant", doc.answer)] for doc in docs()]
    messages = [[{"role": role, "content": text} for role, text in chat] for chat in chats]
    ulysses = dist.get_world_size() // ring
    trainer = SequenceParallelSFTTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        SFTConfig(
            output_dir=str(out),
            assistant_only_loss=True,
            packing=True,
            max_length=1024,  # tokens of a row, all ranks together
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            max_steps=steps,
            logging_steps=1,
            bf16=False,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),  # Accelerate sees the ranks of a CPU only so
        ),
        train_dataset=Dataset.from_dict({"messages": messages}),
        processing_class=tokenizer,
        sequence_parallel=SequenceParallelConfig(ulysses_size=ulysses, ring_size=ring),
    )
    trainer.train()
    trainer.save_model(str(out / "hf"))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    with ranks():
        losses = tyro.cli(main)
