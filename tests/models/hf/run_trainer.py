"""What one rank does in the tests of the Trainer."""

import gc
import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

import usp.loss
from tests.models.hf.causal import causal_model
from tests.models.hf.run_bridge import whole
from usp.mesh import TABLES, build_mesh
from usp.models.hf import BridgedCausalLM
from usp.models.hf.trainer import SequenceParallelConfig, SequenceParallelTrainer


class Examples(Dataset[dict[str, Any]]):
    """Documents of many lengths; the first part of each is a prompt that is no target.

    `weighted`: a number for each token, some of them 0, for two documents all of them.
    """

    def __init__(self, number: int, seed: int, weighted: bool = False) -> None:
        draw = random.Random(seed)
        self.rows: list[dict[str, Any]] = []
        for index in range(number):
            tokens = [draw.randrange(1, 101) for _ in range(draw.randrange(3, 21))]
            prompt = draw.randrange(len(tokens))
            row: dict[str, Any] = {"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]}
            self.rows.append({**row, "loss_weights": weights_of(tokens, index)} if weighted else row)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def weights_of(tokens: list[int], index: int) -> list[float]:
    return [0.0 if index % 13 == 5 else (token % 7) / 50 for token in tokens]


def padded(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows padded on the right to the longest."""
    length = max(len(e["input_ids"]) for e in examples)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0, "loss_weights": 0.0}
    rows = [{**e, "attention_mask": [1] * len(e["input_ids"])} for e in examples]
    keys = [key for key in fill if key in rows[0]]
    return {k: torch.tensor([r[k] + [fill[k]] * (length - len(r[k])) for r in rows]) for k in keys}


def flattened(examples: list[dict[str, list[int]]]) -> dict[str, Any]:
    """All documents in one row, padding-free."""
    return DataCollatorWithFlattening(return_flash_attn_kwargs=True)(examples)


STEPS = 8  # two epochs
COLLATORS = {"padded": padded, "flattened": flattened}


def as_launched() -> None:
    """What torchrun sets, and Accelerate asks for although the process group exists.

    Accelerate collects garbage often: half a second each time, unless what was imported is left out of it.
    """
    gc.freeze()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


def arguments(out: Path, rows: int, **more: Any) -> TrainingArguments:
    fields: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
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


class WeightedLoss(Trainer):
    """Weights on one process: whole logits, and weights moved with the labels, as one would write it."""

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = [*self._signature_columns, "loss_weights"]  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        samples = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        counted = [b["loss_weights"][:, 1:][b["labels"][:, 1:] != -100].double().sum() for b in samples]
        return samples, torch.stack(counted).sum()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        weights, labels = inputs["loss_weights"][:, 1:], inputs["labels"][:, 1:]
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        losses = cross_entropy(logits[:, :-1].flatten(0, 1).double(), labels.flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / num_items_in_batch


def plain(out: Path, kind: type[Trainer] = Trainer, weighted: bool = False, **more: Any) -> Any:
    """Transformers' own Trainer on one process, every document a row."""
    torch.set_num_threads(1)
    gc.freeze()
    model = causal_model("llama")
    data = Examples(26, 1, weighted)
    trainer = kind(model, arguments(out, 4, **more), train_dataset=data, data_collator=padded)
    trainer.loss_is_scaled_for_ga = True
    trainer.train()
    return curve(trainer), {n: p.detach().clone() for n, p in model.named_parameters()}


def make(
    out: Path,
    dp: int,
    ring: int,
    ulysses: int,
    table: str,
    collator: str,
    kind: str,
    weighted: bool = False,
    **more: Any,
) -> Any:
    """`kind`: an unchanged model of Transformers, or a bridged one, its parameters whole or cut.

    A bridged one is read from the folder `start` beside `out`.
    """
    as_launched()
    if kind == "plain":
        model: Any = causal_model("llama")
    else:
        mesh = build_mesh(dp=dp, ring=ring, ulysses=ulysses)
        folder = out.parent / "start"
        model = BridgedCausalLM.from_pretrained(folder, table=TABLES[table], mesh=mesh, whole=kind == "whole")
    return SequenceParallelTrainer(
        model,
        arguments(out, 4 // dp, **more),
        train_dataset=Examples(26, 1, weighted),
        eval_dataset=Examples(10, 2, weighted),
        data_collator=COLLATORS[collator],
        sequence_parallel=SequenceParallelConfig(ulysses_size=ulysses, ring_size=ring, table=table),
    )


def on_rank(out: Path, *run: Any, **more: Any) -> Any:
    trainer = make(out, *run, **more)
    before = {} if more else trainer.evaluate()
    trainer.train()
    params = {n: whole(p.detach()) for n, p in trainer.model.named_parameters()}
    metrics = trainer.evaluate()
    trainer.save_model(str(out / "saved"))
    dist.barrier()
    implementation = trainer.model.config._attn_implementation
    held = [held_by(p) for p in trainer.model.parameters()]
    held += [held_by(t) for state in trainer.optimizer.state.values() for t in state.values() if t.dim()]
    params = params if dist.get_rank() == 0 else {}
    return curve(trainer), params, (before, metrics), implementation, sum(held)


def held_by(value: torch.Tensor) -> int:
    """Elements on this rank."""
    return (value.to_local() if isinstance(value, DTensor) else value).numel()


class Seen(TorchDispatchMode):
    """The most tokens of a hidden state, [b, s, D], and of logits, [..., V], that any operation made."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sizes = config.hidden_size, config.vocab_size
        self.hidden = self.logits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        width, vocab = self.sizes
        for t in pytree.tree_leaves(out):
            if not isinstance(t, torch.Tensor) or t.shape == (width, vocab):  # the head, turned
                continue
            if t.dim() == 3 and t.shape[2] == width:
                self.hidden = max(self.hidden, t.numel() // width)
            if t.shape[-1:] == (vocab,):
                self.logits = max(self.logits, t.numel() // vocab)
        return out


TILE = 6  # tokens; more than the five that a model is tried with


def evaluated_on_rank(out: Path, kind: str) -> tuple[int, int]:
    """Tokens of hidden states and of logits in an evaluation of 3 rows a batch, in tiles of a few logits."""
    trainer = make(out, 1, 1, 2, "usp", "padded", kind)
    usp.loss.MAX_TILE_ELEMENTS, before = TILE * 101, usp.loss.MAX_TILE_ELEMENTS
    try:
        with Seen(trainer.model.config) as seen:
            trainer.evaluate()
    finally:
        usp.loss.MAX_TILE_ELEMENTS = before
    return seen.hidden, seen.logits


class StopAt6(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 6


def different_on_rank(out: Path) -> str:
    """Each rank reads examples of its own, as if a launcher had dealt them."""
    trainer = make(out, 1, 1, 2, "ulysses", "padded", "plain")
    trainer.train_dataset = Examples(26, dist.get_rank())
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return ""


def alone_on_rank(out: Path) -> str:
    """Accelerate does not see the ranks of a CPU unless it is told to."""
    as_launched()
    try:
        SequenceParallelTrainer(
            causal_model("llama"),
            arguments(out, 1, use_cpu=False),
            sequence_parallel=SequenceParallelConfig(ulysses_size=2),
        )
    except ValueError as error:
        return str(error)
    return ""


def stopped_on_rank(out: Path, *run: Any) -> None:
    """Stop in the middle of the second epoch, a step after a checkpoint."""
    trainer = make(out, *run, save_strategy="steps", save_steps=5)
    trainer.add_callback(StopAt6())
    trainer.train()
    dist.barrier()


def resumed_on_rank(out: Path, *run: Any) -> Any:
    """Start again in a new Trainer: the whole run's curve."""
    trainer = make(out, *run)
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-5"))
    return curve(trainer)


def weighted_on_rank(out: Path, *run: Any) -> Any:
    return on_rank(out, *run, weighted=True, max_steps=4)
