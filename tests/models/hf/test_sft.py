"""TRL's SFTTrainer with the sequence cut: the curve of TRL's own on one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.models.hf.causal import causal_model
from tests.models.hf.run_sft import (
    WEIGHTED,
    config,
    conversations,
    cut,
    on_rank,
    plain,
    plain_weighted,
    tokenized,
    tokenizer,
)
from tests.models.hf.test_trainer import TOLERANCE, assert_same, beside
from tests.pool import Pool
from usp.models.hf.sft import SequenceParallelSFTTrainer
from usp.models.hf.trainer import SequenceParallelConfig

RUNS = [
    (2, "ulysses", "plain", {"padding_free": True}),
    (2, "usp", "cut", {}),
]


def test_prompts_and_completions(start: Path, two: Pool, tmp_path: Path) -> None:
    # cases H4, H5, H28, H70: TRL's documented configurations with a cut sequence
    want = plain(tmp_path / "plain")
    for index, run in enumerate(RUNS):
        (got, evaluated), (_, other) = two.run(on_rank, beside(start, tmp_path, str(index)), *run)
        assert_same(got, want, run, 6)
        assert evaluated == other


def test_weights(two: Pool, tmp_path: Path) -> None:
    want = plain_weighted(tmp_path / "plain")
    more = {"padding_free": True, "max_steps": WEIGHTED}
    for got, _ in two.run(on_rank, tmp_path / "two", 2, "ulysses", "plain", more, True):
        assert_same(got, want, "weights", WEIGHTED)


def test_packing(two: Pool, tmp_path: Path) -> None:
    """Case D13: packed rows, two ranks as one, whose padded curve the test above compares with TRL's own."""
    packed = {"packing": True, "max_length": 40, "per_device_train_batch_size": 1}
    want, evaluated = cut(tmp_path / "one", 1, "usp", "plain", packed)
    (tmp_path / "two").mkdir()
    got, value = two.run(on_rank, tmp_path / "two", 2, "ulysses", "plain", packed)[0]
    assert_same(got, want, "packed", 6)
    assert abs(value - evaluated) <= TOLERANCE * evaluated


def test_refusal(tmp_path: Path) -> None:
    def make(args: Any, data: Any) -> None:
        SequenceParallelSFTTrainer(
            causal_model("llama"),
            args,
            train_dataset=data,
            processing_class=tokenizer(),
            sequence_parallel=SequenceParallelConfig(),
        )

    with pytest.raises(ValueError, match="loss_type='dft'"):
        make(config(tmp_path, loss_type="dft"), conversations(4))
    with pytest.raises(ValueError, match="loss_weights must not be packed"):  # TRL would drop the column
        make(config(tmp_path, packing=True, max_length=40), tokenized(4))
