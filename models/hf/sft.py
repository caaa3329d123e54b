"""TRL's SFTTrainer with the sequence cut over ranks. Needs the extra `hf`."""

from __future__ import annotations

from typing import Any

from trl.trainer.sft_trainer import SFTTrainer

from usp.models.hf.trainer import SequenceParallelMixin
from usp.models.hf.weights import WEIGHTS


class SequenceParallelSFTTrainer(SequenceParallelMixin, SFTTrainer):
    """As TRL's, given `sequence_parallel=SequenceParallelConfig(...)` too: data preparation, packing, prompts
    that are no targets and PEFT stay TRL's; loss, batches and evaluation are `SequenceParallelMixin`'s.

    TRL's metrics of whole logits (entropy, token accuracy) are not made. A tokenized data set may have the
    column `loss_weights`. Raises ValueError for a loss_type other than "nll", and for weights with packing.
    """

    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: Any,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Any:
        if packing and WEIGHTS in (getattr(dataset, "column_names", None) or ()):
            raise ValueError(
                f"{WEIGHTS} must not be packed here, as TRL would drop them, got packing=True. Pack all "
                f"columns with trl.pack_dataset first, and pass padding_free=True instead."
            )
        return super()._prepare_dataset(
            dataset, processing_class, args, packing, formatting_func, dataset_name
        )
