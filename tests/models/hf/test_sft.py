"""TRL's SFTTrainer with the sequence cut: the curve of TRL's own on one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.models.hf.run_sft import config, conversations, cut, on_rank, plain, tokenizer
from tests.models.hf.test_trainer import TOLERANCE
from tests.pool import Pool
from usp.models.hf.sft import SequenceParallelSFTTrainer
from usp.models.hf.trainer import SequenceParallelConfig


def assert_same(got: list[dict[str, float]], want: list[dict[str, float]], what: Any) -> None:
    assert len(got) == len(want) == 6
    for a, b in zip(got, want, strict=True):
        assert (a["learning_rate"], a["epoch"]) == (b["learning_rate"], b["epoch"]), what
        for key in ("loss", "grad_norm"):
            assert abs(a[key] - b[key]) <= TOLERANCE * b[key], (what, key, a, b)


RUNS = [
    (2, "ulysses", "plain", {"padding_free": True}),
    (2, "usp", "bridge", {}),
]


def test_prompts_and_completions(two: Pool, tmp_path: Path) -> None:
    # cases H4, H5, H28, H70: TRL's documented configurations with a cut sequence
    want = plain(tmp_path / "plain")
    for index, run in enumerate(RUNS):
        out = tmp_path / str(index)
        out.mkdir()
        (got, evaluated), (_, other) = two.run(on_rank, out, *run)
        assert_same(got, want, run)
        assert evaluated == other


def test_packing(two: Pool, tmp_path: Path) -> None:
    """Packed rows: two ranks as one, whose padded curve the test above compares with TRL's own."""
    packed = {"packing": True, "max_length": 40, "per_device_train_batch_size": 1}
    want, evaluated = cut(tmp_path / "one", 1, "usp", "plain", packed)
    (tmp_path / "two").mkdir()
    got, value = two.run(on_rank, tmp_path / "two", 2, "ulysses", "plain", packed)[0]
    assert_same(got, want, "packed")
    assert abs(value - evaluated) <= TOLERANCE * evaluated


def test_refusal(tmp_path: Path) -> None:
    from tests.models.hf.causal import causal_model

    with pytest.raises(ValueError, match="loss_type='dft'"):
        SequenceParallelSFTTrainer(
            causal_model("llama"),
            config(tmp_path, loss_type="dft"),
            train_dataset=conversations(4),
            processing_class=tokenizer(),
            sequence_parallel=SequenceParallelConfig(),
        )
