"""Transformers' Trainer with the sequence cut over ranks. Needs the extra `hf`.

The loss is that of the one-process run: token losses of all micro-batches and ranks, divided by the number of
their targets. Evaluation uses the same sums. Data, steps and checkpoints are those of dp ranks, however many
ranks share a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from usp.mesh import TABLES, MeshLike, Table, build_mesh
from usp.mesh.devices import check_world_size
from usp.models.hf.bridge import ONE_RANK, BridgedCausalLM
from usp.models.hf.handed import Handed
from usp.models.hf.inputs import count_targets, shard_inputs
from usp.models.hf.loader import DealtCollator, check_same, same_on_every_rank
from usp.models.hf.parallel import SequenceParallel, sequence_parallel


@dataclass(frozen=True, kw_only=True)
class SequenceParallelConfig:
    """How the ranks are used; the names are those of Accelerate's ParallelismConfig where it has them.

    ulysses_size * ring_size ranks share one sequence (sp_size); dp_replicate_size groups of them read
    different rows, by default as many as there are. `table`: a name of `TABLES`, or a table.
    """

    ulysses_size: int = 1
    ring_size: int = 1
    dp_replicate_size: int | None = None
    table: str | Table = "usp"
    kernel: str = "auto"

    @property
    def sp_size(self) -> int:
        return self.ulysses_size * self.ring_size

    def resolve(self, world: int) -> tuple[Table, dict[str, int]]:
        """The table and the sizes of the mesh. ValueError for what does not fit or would cut nothing."""
        if isinstance(self.table, str) and self.table not in TABLES:
            raise ValueError(f"table={self.table!r} must be one of {', '.join(sorted(TABLES))}. Change it.")
        table = TABLES[self.table] if isinstance(self.table, str) else self.table
        for axis, size in (("ulysses", self.ulysses_size), ("ring", self.ring_size)):
            if size > 1 and axis not in table.tokens.axes:
                raise ValueError(
                    f"{axis}_size={size} must be 1 where it cuts nothing, got table={table.name!r}. Choose "
                    f"another table."
                )
        dp = max(1, world // self.sp_size) if self.dp_replicate_size is None else self.dp_replicate_size
        check_world_size(world, dp=dp, ring=self.ring_size, ulysses=self.ulysses_size)
        return table, {"dp": dp, "ring": self.ring_size, "ulysses": self.ulysses_size}


class SequenceParallelMixin(Trainer):
    """Put before a Trainer class: `class Mine(SequenceParallelMixin, SFTTrainer)`.

    Takes `sequence_parallel=SequenceParallelConfig(...)` beside the Trainer's own arguments. The model is a
    `BridgedCausalLM` with whole parameters, or any causal model that `sequence_parallel` takes.
    """

    def __init__(self, *args: Any, sequence_parallel: SequenceParallelConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.table, self.sizes = sequence_parallel.resolve(world)
        self.mesh: MeshLike = build_mesh(**self.sizes, device_type=None) if world > 1 else ONE_RANK
        self.kernel = sequence_parallel.kernel
        self.loss_is_scaled_for_ga = True
        self._sp: SequenceParallel | None = None
        self._checked: Any = None
        self._refuse()

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
                ("a model of another table", self._other_table(model)),
            )
            if there
        ]
        if problems:
            raise ValueError(f"this Trainer must run without {'; '.join(problems)}. Leave it out.")

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
        """As the Trainer's, with targets counted over the global batches."""
        samples = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        epoch = int(self.state.epoch or 0)
        if samples and self._checked != epoch:
            check_same(samples[0], self.mesh)
            self._checked = epoch
        return samples, torch.tensor(sum(count_targets(batch) for batch in samples))

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # cut on the CPU first; only this rank's part goes to the device

    def _track_num_input_tokens(self, inputs: Any) -> None:
        kind = self.args.include_num_input_tokens_seen
        if kind != "no":
            counted = inputs["attention_mask"] if kind == "non_padding" else inputs["input_ids"].new_ones(1)
            number = int(counted.sum()) if kind == "non_padding" else inputs["input_ids"].numel()
            self.state.num_input_tokens_seen += number

    # ---- loss, train and evaluation ----

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of the global batch over `num_items_in_batch`, the same on every rank."""
        if return_outputs:
            raise ValueError("return_outputs=True must be left out: whole logits never exist.")
        device: torch.device = self.args.device
        shard = shard_inputs(
            inputs, table=self.table, mesh=self.mesh, device=device, num_valid=num_items_in_batch
        )
        if self._sp is not None:
            return self._sp.loss(shard, engine=model)
        return model(shard=Handed(shard)).loss

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
        """Mean over all targets of the data set: sums of losses divided by sums of counts."""
        model: Any = self.accelerator.unwrap_model(self.model)
        training = model.training
        model.eval()
        total = torch.zeros((), dtype=torch.float64)
        count = num_samples = 0
        with self._cut(), torch.no_grad():
            for inputs in dataloader:
                part = self.compute_loss(model, inputs, num_items_in_batch=1)
                total += part.double().cpu()
                count += count_targets(inputs)
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
        averaged = dist.is_initialized() and dist.get_world_size() > 1  # Accelerate takes the mean
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
