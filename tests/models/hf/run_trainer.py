"""What one rank does in the tests of the Trainer."""

import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

from tests.models.hf.causal import causal_model
from usp.mesh import TABLES, build_mesh
from usp.models.hf import BridgedCausalLM
from usp.models.hf.trainer import SequenceParallelConfig, SequenceParallelTrainer


class Examples(Dataset[dict[str, list[int]]]):
    """Documents of many lengths; the first part of each is a prompt that is no target."""

    def __init__(self, number: int, seed: int) -> None:
        draw = random.Random(seed)
        self.rows = []
        for _ in range(number):
            tokens = [draw.randrange(1, 101) for _ in range(draw.randrange(3, 21))]
            prompt = draw.randrange(len(tokens))
            self.rows.append({"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.rows[index]


def padded(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows padded on the right to the longest."""
    length = max(len(e["input_ids"]) for e in examples)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [{**e, "attention_mask": [1] * len(e["input_ids"])} for e in examples]
    return {k: torch.tensor([r[k] + [v] * (length - len(r[k])) for r in rows]) for k, v in fill.items()}


def flattened(examples: list[dict[str, list[int]]]) -> dict[str, Any]:
    """All documents in one row, padding-free."""
    return DataCollatorWithFlattening(return_flash_attn_kwargs=True)(examples)


COLLATORS = {"padded": padded, "flattened": flattened}


def as_launched() -> None:
    """What torchrun sets, and Accelerate asks for although the process group exists."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


def arguments(out: Path, rows: int, **more: Any) -> TrainingArguments:
    fields: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": 20,
        "learning_rate": 3e-3,
        "warmup_steps": 4,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "max_grad_norm": 0.5,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 11,
        "data_seed": 5,
        **more,
    }
    return TrainingArguments(**fields)


def curve(trainer: Trainer) -> list[dict[str, float]]:
    keys = ("loss", "grad_norm", "learning_rate", "epoch", "step")
    return [{k: float(e[k]) for k in keys} for e in trainer.state.log_history if "loss" in e]


def plain(out: Path, family: str = "llama") -> Any:
    """Transformers' own Trainer on one process, every document a row."""
    torch.set_num_threads(1)
    model = causal_model(family)
    trainer = Trainer(model, arguments(out, 4), train_dataset=Examples(26, 1), data_collator=padded)
    trainer.train()
    return curve(trainer), {n: p.detach().clone() for n, p in model.named_parameters()}


def make(
    out: Path, dp: int, ring: int, ulysses: int, table: str, collator: str, kind: str, **more: Any
) -> Any:
    as_launched()
    model = causal_model("llama")
    if kind == "bridge":
        mesh = build_mesh(dp=dp, ring=ring, ulysses=ulysses)
        folder = out / "start"
        model.save_pretrained(folder, is_main_process=dist.get_rank() == 0)
        dist.barrier()
        model = BridgedCausalLM.from_pretrained(folder, table=TABLES[table], mesh=mesh, whole=True)
    return SequenceParallelTrainer(
        model,
        arguments(out, 4 // dp, **more),
        train_dataset=Examples(26, 1),
        eval_dataset=Examples(10, 2),
        data_collator=COLLATORS[collator],
        sequence_parallel=SequenceParallelConfig(ulysses_size=ulysses, ring_size=ring, table=table),
    )


def on_rank(out: Path, *run: Any) -> Any:
    trainer = make(out, *run)
    trainer.train()
    first = dist.get_rank() == 0
    params = {n: p.detach().clone() for n, p in trainer.model.named_parameters()} if first else {}
    metrics = trainer.evaluate()
    trainer.save_model(str(out / "saved"))
    dist.barrier()
    implementation = trainer.model.config._attn_implementation
    return curve(trainer), params, metrics, implementation


class StopAt7(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 7


def different_on_rank(out: Path) -> str:
    """Each rank reads examples of its own, as if a launcher had dealt them."""
    trainer = make(out, 1, 1, 2, "ulysses", "padded", "plain")
    trainer.train_dataset = Examples(26, dist.get_rank())
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return ""


def resumed_on_rank(out: Path, *run: Any) -> Any:
    """Stop in the middle of the second epoch, start again in a new Trainer: the whole run's curve."""
    first = make(out, *run, save_strategy="steps", save_steps=5)
    first.add_callback(StopAt7())
    first.train()
    second = make(out, *run, save_strategy="steps", save_steps=5)
    second.train(resume_from_checkpoint=str(out / "checkpoint-5"))
    dist.barrier()
    return curve(second)
