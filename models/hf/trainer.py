"""Transformers' Trainer with the sequence cut over ranks. Needs the extra `hf`.

The loss is that of the one-process run: token losses of all micro-batches and ranks, divided by the number of
their targets. Evaluation uses the same sums. Data, steps and checkpoints are those of dp ranks, however many
ranks share a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from transformers.trainer_utils import EvalLoopOutput

from usp.mesh import MeshLike, build_mesh
from usp.models.hf.bridge import ONE_RANK, BridgedCausalLM
from usp.models.hf.config import SequenceParallelConfig
from usp.models.hf.handed import Handed
from usp.models.hf.inputs import total_weight, weighted_inputs
from usp.models.hf.loader import DealtCollator, check_same, same_on_every_rank
from usp.models.hf.parallel import SequenceParallel, sequence_parallel
from usp.models.hf.resume import CutParameters
from usp.models.hf.weights import WEIGHTS

__all__ = ["SequenceParallelConfig", "SequenceParallelMixin", "SequenceParallelTrainer"]

# What the mixin does in its own way, or does not call: another class's would be left out without a word.
_REPLACED = (
    "compute_loss", "prediction_step", "evaluation_loop", "get_batch_samples", "_prepare_inputs",
    "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader",
)  # fmt: skip
_STOOD_FOR = ("transformers.trainer.Trainer", "trl.trainer.sft_trainer.SFTTrainer")


class SequenceParallelMixin(CutParameters):
    """Put before a Trainer class: `class Mine(SequenceParallelMixin, SFTTrainer)`.

    Takes `sequence_parallel=SequenceParallelConfig(...)` beside the Trainer's own arguments. The model is a
    `BridgedCausalLM`, its parameters whole or cut, or any causal model that `sequence_parallel` takes.

    Examples, or what the collator makes of them, may hold `loss_weights`, one number at least 0 for each
    token: the loss is then the sum of weight * token loss over the sum of weights, in evaluation too.
    Raises ValueError for a class whose own loss, evaluation or loaders would never be called, and for what
    the loss does not honour.
    """

    def __init__(self, *args: Any, sequence_parallel: SequenceParallelConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        world = dist.get_world_size() if dist.is_initialized() else 1
        seen = self.accelerator.num_processes
        if world != seen:
            raise ValueError(
                f"world_size={world} must be what Accelerate sees, got {seen}: each rank would train alone. "
                f"Without a GPU pass use_cpu=True to the training arguments."
            )
        self.table, self.sizes = sequence_parallel.resolve(world)
        self.mesh: MeshLike = build_mesh(**self.sizes, device_type=None) if world > 1 else ONE_RANK
        self.kernel = sequence_parallel.kernel
        self.loss_is_scaled_for_ga = True
        self._sp: SequenceParallel | None = None
        self._checked: Any = None
        self._refuse()
        self.own_placement()

    def _refuse(self) -> None:
        model = self.accelerator.unwrap_model(self.model)
        problems = [
            name
            for name, there in (
                ("compute_loss_func", self.compute_loss_func is not None),
                ("compute_metrics, which needs whole logits", self.compute_metrics is not None),
                ("label_smoothing_factor", bool(self.args.label_smoothing_factor)),
                ("train_sampling_strategy='batch_rebalance'", self._sampling() == "batch_rebalance"),
                ("use_liger_kernel, whose loss is not used", bool(self.args.use_liger_kernel)),
                ("several devices in one process", self.args.n_gpu > 1),
                ("model_init, whose models come after the cut", self.model_init is not None),
                ("neftune_noise_alpha, whose noise would be that of a part", bool(self._neftune())),
                ("a model of another table", self._other_table(model)),
                ("a parallelism_config that cuts what the mesh cuts", self._cut_twice()),
                (f"loss_type={self._loss_type()!r}, as the loss here is 'nll'", self._loss_type() != "nll"),
            )
            if there
        ]
        problems += [f"{name}, which would never be called" for name in self._replaced()]
        if problems:
            raise ValueError(f"this Trainer must run without {'; '.join(problems)}. Leave it out.")

    def _replaced(self) -> list[str]:
        mro = type(self).__mro__
        beside = [
            c
            for c in mro[mro.index(SequenceParallelMixin) + 1 :]
            if f"{c.__module__}.{c.__qualname__}" not in _STOOD_FOR
        ]
        return [f"{c.__name__}.{name}" for c in beside for name in _REPLACED if name in vars(c)]

    def _cut_twice(self) -> bool:
        """Accelerate's own cut of sequences or weights: of what is cut already, in a mean of fewer ranks."""
        config: Any = self.accelerator.parallelism_config
        return any(getattr(config, name, 1) > 1 for name in ("cp_size", "sp_size", "tp_size"))

    def _loss_type(self) -> Any:
        return getattr(self.args, "loss_type", "nll")

    def _neftune(self) -> Any:
        return getattr(self.args, "neftune_noise_alpha", None)

    def _sampling(self) -> str:
        return str(getattr(self.args, "train_sampling_strategy", ""))

    def _other_table(self, model: Any) -> bool:
        return isinstance(model, BridgedCausalLM) and (
            model.table.name != self.table.name or model.mesh != self.mesh
        )

    # ---- data: the same global batch on every rank ----

    def get_train_dataloader(self) -> Any:
        if self.train_dataset is None:
            raise ValueError("train_dataset=None must be a data set. Pass one.")
        data: Any = self.train_dataset
        return self._loader(data, self._train_batch_size, self._get_train_sampler(data), "training")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        data: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        data = self.eval_dataset[data] if isinstance(data, str) else data  # type: ignore[index]
        if data is None:
            raise ValueError("eval_dataset=None must be a data set. Pass one.")
        return self._loader(data, self.args.eval_batch_size, None, "evaluation")

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._loader(test_dataset, self.args.eval_batch_size, None, "test")

    def _loader(self, data: Any, size: int, sampler: Any, what: str) -> Any:
        dp, collate = self.sizes["dp"], self.data_collator
        if hasattr(data, "column_names"):
            data = self._remove_unused_columns(data, description=what)
        else:
            collate = self._get_collator_with_removed_columns(collate, description=what)
        return same_on_every_rank(data, sampler, self.args, DealtCollator(collate, dp, size), size * dp)

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.sizes["dp"])

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """As the Trainer's, with targets, or their weights, counted over the global batches."""
        samples = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        epoch = int(self.state.epoch or 0)
        if samples and self._checked != epoch:
            check_same(samples[0], self.mesh)
            self._checked = epoch
        if len({WEIGHTS in batch for batch in samples}) > 1:
            raise ValueError(f"{WEIGHTS} must be in all batches or in none, got both. Add the missing.")
        return samples, torch.tensor(sum(total_weight(batch) for batch in samples), dtype=torch.float64)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        held: Any = self
        held._signature_columns = [*dict.fromkeys([*held._signature_columns, WEIGHTS])]

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # cut on the CPU first; only this rank's part goes to the device

    def _track_num_input_tokens(self, inputs: Any) -> None:
        kind = self.args.include_num_input_tokens_seen
        if kind != "no":
            tokens = inputs["attention_mask"].sum() if kind == "non_padding" else inputs["input_ids"].numel()
            self.state.num_input_tokens_seen += int(tokens)

    # ---- loss, train and evaluation ----

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of the global batch over `num_items_in_batch`, the same on every rank."""
        if return_outputs:
            raise ValueError("return_outputs=True must be left out: whole logits never exist.")
        device: torch.device = self.args.device
        shard, weights = weighted_inputs(
            inputs, table=self.table, mesh=self.mesh, device=device, num_valid=num_items_in_batch
        )
        if self._sp is not None:
            return self._sp.loss(shard, weights=weights, engine=model)
        return model(shard=Handed(shard, weights)).loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self._cut():
            return super().train(*args, **kwargs)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Mean over all targets of the data set: sums of losses divided by sums of counts, or of weights."""
        model: Any = self.accelerator.unwrap_model(self.model)
        training = model.training
        model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.args.device)
        count, num_samples = 0.0, 0
        with self._cut(), torch.no_grad():
            for inputs in dataloader:
                part = self.compute_loss(model, inputs, num_items_in_batch=1)
                total += part.double()
                count += total_weight(inputs)
                num_samples += inputs["input_ids"].shape[0]
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        model.train(training)
        loss = float(total) / count if count else float("nan")
        metrics = {f"{metric_key_prefix}_loss": loss, f"{metric_key_prefix}_num_targets": count}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=num_samples)  # type: ignore[arg-type]

    @contextmanager
    def _cut(self) -> Iterator[None]:
        """The model on shards for as long as it trains or is evaluated; undone afterwards."""
        model: Any = self.accelerator.unwrap_model(self.model)
        core = model.get_base_model() if hasattr(model, "get_base_model") else model
        # Accelerate takes the mean of the ranks' gradients; those of cut parameters are sums already
        averaged = dist.is_initialized() and dist.get_world_size() > 1 and self.cut_model() is None
        if isinstance(core, BridgedCausalLM):
            before, core.averaged = core.averaged, averaged
            try:
                yield
            finally:
                core.averaged = before
        elif self._sp is not None:
            yield
        else:
            placed: dict[str, Any] = {"mesh": self.mesh, "table": self.table, "kernel": self.kernel}
            with sequence_parallel(model, averaged=averaged, **placed) as self._sp:
                try:
                    yield
                finally:
                    self._sp = None


class SequenceParallelTrainer(SequenceParallelMixin):
    """Transformers' Trainer with the sequence cut over ranks, see `SequenceParallelMixin`."""
