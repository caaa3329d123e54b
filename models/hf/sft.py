"""TRL's SFTTrainer with the sequence cut over ranks. Needs the extra `hf`."""

from __future__ import annotations

from typing import Any

from trl.trainer.sft_trainer import SFTTrainer

from usp.models.hf.trainer import SequenceParallelMixin


class SequenceParallelSFTTrainer(SequenceParallelMixin, SFTTrainer):
    """As TRL's, given `sequence_parallel=SequenceParallelConfig(...)` too: data preparation, packing, prompts
    that are no targets and PEFT stay TRL's; loss, batches and evaluation are `SequenceParallelMixin`'s.

    TRL's metrics of whole logits (entropy, token accuracy) are not made. Raises ValueError for a loss_type
    other than "nll".
    """

    def _refuse(self) -> None:
        super()._refuse()
        kind: Any = getattr(self.args, "loss_type", "nll")
        if kind != "nll":
            raise ValueError(f"loss_type={kind!r} must be 'nll', the loss that is computed here. Change it.")
