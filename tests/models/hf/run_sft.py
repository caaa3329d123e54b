"""What one rank does in the tests of TRL's SFTTrainer."""

import os
import random
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from tests.models.hf.causal import causal_model
from tests.models.hf.run_trainer import Examples, WeightedLoss, as_launched, curve, padded
from usp.mesh import TABLES, build_mesh
from usp.models.hf import BridgedCausalLM
from usp.models.hf.sft import SequenceParallelSFTTrainer
from usp.models.hf.trainer import SequenceParallelConfig


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({f"t{i}": i for i in range(101)}, unk_token="t1"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="t0", eos_token="t2", unk_token="t1")


def conversations(number: int) -> datasets.Dataset:
    """Prompts, which are no targets, and completions of many lengths."""
    draw = random.Random(3)

    def words() -> str:
        return " ".join(f"t{draw.randrange(3, 101)}" for _ in range(draw.randrange(2, 12)))

    datasets.disable_progress_bars()
    return datasets.Dataset.from_list(
        [{"prompt": words(), "completion": " " + words()} for _ in range(number)]
    )


def config(out: Path, **more: Any) -> SFTConfig:
    fields: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "max_length": None,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        **more,
    }
    return SFTConfig(**fields)


def plain(out: Path) -> Any:
    """TRL's own trainer on one process."""
    torch.set_num_threads(1)
    trainer = SFTTrainer(
        causal_model("llama"), config(out), train_dataset=conversations(22), processing_class=tokenizer()
    )
    trainer.train()
    return curve(trainer)


def tokenized(number: int) -> datasets.Dataset:
    """Documents with a weight for each token, some of them 0."""
    rows = Examples(number, 4, weighted=True).rows
    return datasets.Dataset.from_list([row for row in rows if any(label != -100 for label in row["labels"])])


class WeightedSFT(WeightedLoss, SFTTrainer):
    """TRL's trainer on one process, with weights."""


def plain_weighted(out: Path) -> Any:
    torch.set_num_threads(1)
    trainer = WeightedSFT(
        causal_model("llama"),
        config(out, max_steps=WEIGHTED),
        train_dataset=tokenized(22),
        data_collator=padded,
        processing_class=tokenizer(),
    )
    trainer.loss_is_scaled_for_ga = True
    trainer.train()
    return curve(trainer)


WEIGHTED = 3


def cut(out: Path, ulysses: int, table: str, kind: str, more: dict[str, Any], weighted: bool = False) -> Any:
    model = causal_model("llama")
    if kind == "cut":
        mesh = build_mesh(ulysses=ulysses)
        model = BridgedCausalLM.from_pretrained(out.parent / "start", table=TABLES[table], mesh=mesh)
    data = tokenized if weighted else conversations
    trainer = SequenceParallelSFTTrainer(
        model,
        config(out, **more),
        train_dataset=data(22),
        eval_dataset=data(6),
        processing_class=tokenizer(),
        sequence_parallel=SequenceParallelConfig(ulysses_size=ulysses, table=table),
    )
    trainer.train()
    return curve(trainer), trainer.evaluate()["eval_loss"]


def on_rank(*args: Any) -> Any:
    as_launched()
    return cut(*args)
