"""Transformers' Trainer with the sequence cut: the curve of the plain Trainer on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithFlattening

from tests.models.hf.causal import causal_model
from tests.models.hf.run_trainer import (
    Examples,
    arguments,
    different_on_rank,
    on_rank,
    plain,
    resumed_on_rank,
)
from tests.models.tiny import load_hf
from tests.pool import Pool
from usp.models.hf.trainer import SequenceParallelConfig, SequenceParallelTrainer

# The plain Trainer computes token losses from float32 logits and norms in float32: 6e-8 each, over 20 steps
# of AdamW, which divides by the root of small second moments.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return plain(tmp_path_factory.mktemp("plain"))


def assert_same(got: list[dict[str, float]], want: list[dict[str, float]], what: Any) -> None:
    assert len(got) == len(want) == 20
    for a, b in zip(got, want, strict=True):
        for key in ("learning_rate", "epoch", "step"):
            assert a[key] == b[key], (what, key, a, b)
        for key in ("loss", "grad_norm"):
            assert abs(a[key] - b[key]) <= TOLERANCE * b[key], (what, key, a, b)


RUNS = {
    2: [
        (1, 1, 2, "ulysses", "flattened", "plain"),
        (1, 2, 1, "ring", "padded", "bridge"),
    ],
    4: [
        (2, 1, 2, "usp", "flattened", "plain"),
        (1, 2, 2, "usp", "padded", "plain"),
        (2, 2, 1, "usp", "flattened", "bridge"),
    ],
}


@pytest.mark.parametrize("world", RUNS)
def test_curve(world: int, want: Any, two: Pool, four: Pool, tmp_path: Path) -> None:
    # cases H4, H5, H58, H61, H64
    for index, run in enumerate(RUNS[world]):
        out = tmp_path / str(index)
        out.mkdir()
        results = {2: two, 4: four}[world].run(on_rank, out, *run)
        got, params, metrics, implementation = results[0]
        assert_same(got, want[0], run)
        for name, value in want[1].items():
            assert (params[name] - value).abs().max() <= 1e-4 * value.abs().max(), name
        model, info = load_hf(out / "saved")
        assert not info["missing_keys"]
        assert abs(metrics["eval_loss"] - eval_loss(model)) <= TOLERANCE * metrics["eval_loss"]
        assert implementation == "eager"  # nothing is left behind


def eval_loss(model: Any) -> float:
    """Mean over the targets of all evaluation documents, one by one."""
    total, count = 0.0, 0
    model = model.double().eval()
    for row in Examples(10, 2).rows:
        tokens, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[0].double()
        total += float(cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum"))
        count += int((labels[1:] != -100).sum())
    return total / count


def test_resume_in_an_epoch(want: Any, four: Pool, tmp_path: Path) -> None:
    # 26 documents, 8 a step: step 5 is in the middle of the second epoch
    results = four.run(resumed_on_rank, tmp_path, 2, 1, 2, "ulysses", "flattened", "plain")
    for got in results:
        assert_same(got, want[0], "resumed")


def test_ranks_that_read_different_data(two: Pool, tmp_path: Path) -> None:
    # cases H45, H58: a batch that was dealt before it gets here
    for message in two.run(different_on_rank, tmp_path):
        assert "same global batch, got 2 different" in message


def test_refusals(tmp_path: Path) -> None:
    # case H44: a degree that nothing would use
    with pytest.raises(ValueError, match="ring_size=2 must be 1"):
        SequenceParallelConfig(ring_size=2, table="ulysses").resolve(2)
    with pytest.raises(ValueError, match="world_size=3"):
        SequenceParallelConfig(ulysses_size=2).resolve(3)
    with pytest.raises(ValueError, match="must be one of"):
        SequenceParallelConfig(table="other").resolve(1)
    with pytest.raises(ValueError, match=r"compute_metrics.*label_smoothing_factor"):
        SequenceParallelTrainer(
            causal_model("llama"),
            arguments(tmp_path, 2, label_smoothing_factor=0.1),
            compute_metrics=lambda _: {},
            sequence_parallel=SequenceParallelConfig(),
        )


def test_boundaries_are_not_guessed(tmp_path: Path) -> None:
    """A padding-free collator that says nothing but positions is refused."""
    trainer = SequenceParallelTrainer(
        causal_model("llama"),
        arguments(tmp_path, 2),
        train_dataset=Examples(8, 1),
        data_collator=DataCollatorWithFlattening(),
        sequence_parallel=SequenceParallelConfig(),
    )
    with pytest.raises(ValueError, match="return_flash_attn_kwargs=True"):
        trainer.train()
