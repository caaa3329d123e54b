"""Transformers' Trainer with the sequence cut: the curve of the plain Trainer on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithFlattening

from tests.models.hf.causal import causal_model
from tests.models.hf.run_trainer import (
    STEPS,
    TILE,
    Examples,
    WeightedLoss,
    alone_on_rank,
    arguments,
    different_on_rank,
    evaluated_on_rank,
    on_rank,
    plain,
    resumed_on_rank,
    stopped_on_rank,
    weighted_on_rank,
)
from tests.models.tiny import load_hf
from tests.pool import Pool
from usp.models.hf.trainer import SequenceParallelConfig, SequenceParallelMixin, SequenceParallelTrainer

# The plain Trainer computes token losses from float32 logits and norms in float32: 6e-8 each, over 20 steps
# of AdamW, which divides by the root of small second moments.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return plain(tmp_path_factory.mktemp("plain"))


def beside(start: Path, tmp_path: Path, name: str = "run") -> Path:
    """A new folder next to the model that ranks start from."""
    if not (tmp_path / "start").exists():
        (tmp_path / "start").symlink_to(start)
    (tmp_path / name).mkdir()
    return tmp_path / name


def assert_same(
    got: list[dict[str, float]], want: list[dict[str, float]], what: Any, number: int = STEPS
) -> None:
    assert len(got) == len(want) == number
    for a, b in zip(got, want, strict=True):
        for key in ("learning_rate", "epoch", "step"):
            assert a[key] == b[key], (what, key, a, b)
        for key in ("loss", "grad_norm"):
            assert abs(a[key] - b[key]) <= TOLERANCE * b[key], (what, key, a, b)


RUNS = {
    2: [
        (1, 1, 2, "ulysses", "flattened", "plain"),
        (1, 2, 1, "ring", "padded", "whole"),
    ],
    4: [
        (1, 2, 2, "usp", "padded", "plain"),
        (2, 2, 1, "usp", "flattened", "cut"),
    ],
}


@pytest.mark.parametrize("world", RUNS)
def test_curve(world: int, want: Any, start: Path, two: Pool, four: Pool, tmp_path: Path) -> None:
    # cases H4, H5, H18, H25, H58, H60, H61, H62, H64, H65, D38, D40
    for index, run in enumerate(RUNS[world]):
        out = beside(start, tmp_path, str(index))
        results = {2: two, 4: four}[world].run(on_rank, out, *run)
        got, params, (before, metrics), implementation, _ = results[0]
        assert_same(got, want[0], run)
        for name, value in want[1].items():
            assert (params[name] - value).abs().max() <= 1e-4 * value.abs().max(), name
        model, info = load_hf(out / "saved")
        assert not info["missing_keys"]
        for at, whose in ((before, causal_model("llama")), (metrics, model)):
            assert abs(at["eval_loss"] - eval_loss(whose)) <= TOLERANCE * at["eval_loss"]
        assert implementation == "eager"  # nothing is left behind
        whole = 3 * sum(value.numel() for value in want[1].values())  # with two moments of each
        for *_, held in results:
            assert held == whole if run[5] != "cut" else held < 1.2 * whole / world, run


def eval_loss(model: Any, weighted: bool = False) -> float:
    """Mean over the targets of all evaluation documents, one by one."""
    total, count = 0.0, 0.0
    model = model.double().eval()
    for row in Examples(10, 2, weighted=True).rows:
        tokens, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:]
        weights = torch.tensor(row["loss_weights"], dtype=torch.float64)[1:] if weighted else torch.ones(1)
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[0].double()
        losses = cross_entropy(logits[:-1], labels, ignore_index=-100, reduction="none")
        total += float((losses * weights).sum())
        count += float(((labels != -100) * weights).sum())
    return total / count


@pytest.mark.parametrize("kind", ["plain", "whole"])
def test_evaluation_is_cut(kind: str, start: Path, two: Pool, tmp_path: Path) -> None:
    # cases H25, D38: half of the tokens on each rank, and logits of a tile of them
    lengths = [len(row["input_ids"]) for row in Examples(10, 2).rows]
    batches = [lengths[i : i + 3] for i in range(0, 10, 3)]
    most = max(len(batch) * -(-max(batch) // 2) for batch in batches)
    assert two.run(evaluated_on_rank, beside(start, tmp_path), kind) == [(most, TILE)] * 2


@pytest.mark.parametrize("kind", ["plain", "cut"])
def test_resume_in_an_epoch(kind: str, want: Any, start: Path, two: Pool, four: Pool, tmp_path: Path) -> None:
    # cases D56, D57: on other ranks; 26 documents, 8 a step: step 5 is in the middle of the second epoch
    out = beside(start, tmp_path)
    four.run(stopped_on_rank, out, 2, 1, 2, "usp", "flattened", kind)
    for got in two.run(resumed_on_rank, out, 1, 2, 1, "ring", "padded", kind):
        assert_same(got, want[0], "resumed")


WEIGHTED = 4
WEIGHTED_RUNS = [(2, 1, 2, "usp", "flattened", "plain"), (1, 2, 2, "usp", "padded", "cut")]


def test_weights(start: Path, four: Pool, tmp_path: Path) -> None:
    # cases H26, P65: sum of weight * loss over sum of weights, through micro-batches and ranks
    want, params = plain(tmp_path / "plain", WeightedLoss, weighted=True, max_steps=WEIGHTED)
    for index, run in enumerate(WEIGHTED_RUNS):
        out = beside(start, tmp_path, str(index))
        results = four.run(weighted_on_rank, out, *run)
        got, values, (_, metrics), *_ = results[0]
        assert_same(got, want, run, WEIGHTED)
        for name, value in params.items():
            assert (values[name] - value).abs().max() <= 1e-4 * value.abs().max(), name
        wanted = eval_loss(load_hf(out / "saved")[0], weighted=True)
        assert abs(metrics["eval_loss"] - wanted) <= TOLERANCE * wanted


def test_ranks_that_read_different_data(two: Pool, tmp_path: Path) -> None:
    # cases H45, H58: a batch that was dealt before it gets here
    for message in two.run(different_on_rank, tmp_path):
        assert "same global batch, got 2 different" in message


def test_ranks_that_would_train_alone(two: Pool, tmp_path: Path) -> None:
    for message in two.run(alone_on_rank, tmp_path):
        assert "world_size=2 must be what Accelerate sees, got 1" in message


def test_refusals(tmp_path: Path) -> None:
    # case H44: a degree that nothing would use
    with pytest.raises(ValueError, match="ring_size=2 must be 1"):
        SequenceParallelConfig(ring_size=2, table="ulysses").resolve(2)
    with pytest.raises(ValueError, match="world_size=3"):
        SequenceParallelConfig(ulysses_size=2).resolve(3)
    with pytest.raises(ValueError, match="must be one of"):
        SequenceParallelConfig(table="other").resolve(1)
    # cases H20, D13: metrics of logits that never exist
    with pytest.raises(ValueError, match=r"compute_metrics.*label_smoothing_factor"):
        SequenceParallelTrainer(
            causal_model("llama"),
            arguments(tmp_path, 2, label_smoothing_factor=0.1),
            compute_metrics=lambda _: {},
            sequence_parallel=SequenceParallelConfig(),
        )
    with pytest.raises(ValueError, match=r"model_init, .*neftune_noise_alpha"):
        SequenceParallelTrainer(
            None,
            arguments(tmp_path, 2, neftune_noise_alpha=5.0),
            model_init=lambda: causal_model("llama"),
            sequence_parallel=SequenceParallelConfig(),
        )


def test_what_would_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # cases H44, H70: another objective, whose batches may look alike, must not become this one
    class Mine(SequenceParallelMixin, WeightedLoss):
        """A Trainer with a loss of its own."""

    def make(kind: Any) -> None:
        kind(causal_model("llama"), arguments(tmp_path, 2), sequence_parallel=SequenceParallelConfig())

    with pytest.raises(ValueError, match=r"WeightedLoss\.compute_loss, .*WeightedLoss\.get_batch_samples"):
        make(Mine)
    # case H45: Accelerate would cut what is cut here
    for name in ("_validate_accelerator", "get_device_mesh"):  # on one process they would want more
        monkeypatch.setattr(ParallelismConfig, name, lambda *_: None)
    for name in ("cp_size", "sp_size", "tp_size"):
        config: Any = ParallelismConfig(**dict[str, Any]({name: 2}))
        monkeypatch.setattr(Accelerator, "parallelism_config", property(lambda _, c=config: c))
        with pytest.raises(ValueError, match="parallelism_config that cuts"):
            make(SequenceParallelTrainer)


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
