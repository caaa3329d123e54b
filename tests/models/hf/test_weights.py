"""Weights of targets on one process: the loss they make, what they equal, and what is refused."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.batches import CUTS, ONE, two_rows
from tests.models.hf.causal import causal_model, unsharded
from tests.models.hf.run_bridge import inputs_of, shifted
from tests.models.hf.run_trainer import flattened, padded
from usp.mesh import TABLES
from usp.models.hf import BridgedCausalLM, sequence_parallel, shard_inputs, weighted_inputs
from usp.models.hf.inputs import total_weight
from usp.models.hf.loader import DealtCollator, merge
from usp.models.hf.weights import WeightedCollator

# float64 sums of the same terms in another order, through two layers
TOLERANCE = 1e-11
PLACED: dict[str, Any] = {"mesh": ONE, "table": TABLES["usp"]}


def weights_like(tokens: Tensor) -> Tensor:
    """Small, so that their sum is below 1, and some of them 0."""
    return (tokens % 5) / 1000


def targets() -> Tensor:
    """[2, 23], shifted inside each document."""
    return shifted(inputs_of("packed"))["shift_labels"]


def weighted_mean(logits: Tensor, weights: Tensor) -> float:
    """Of losses made from whole logits; weights at the place of their targets."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets().flatten(), ignore_index=-100, reduction="none")
    counted = (weights * (targets() != -100)).double().flatten()
    return float((losses * counted).sum() / counted.sum())


@pytest.fixture(scope="module")
def bridge(start: Path) -> BridgedCausalLM:
    return BridgedCausalLM.from_pretrained(start, dtype=torch.float64)


def test_the_weighted_mean(bridge: BridgedCausalLM) -> None:
    inputs, logits = inputs_of("packed"), unsharded(causal_model("llama"), two_rows("packed"))[2]
    weights = weights_like(inputs["input_ids"])
    want = weighted_mean(logits, weights.roll(-1, 1))
    assert weights.sum() < 1
    for given in (
        {**inputs, "loss_weights": weights},
        {**inputs, "loss_weights": weights * 8},
        {**shifted(inputs), "loss_weights": weights.roll(-1, 1)},
        {
            **inputs,
            "loss_weights": weights,
            "num_items_in_batch": total_weight({**inputs, "loss_weights": weights}),
        },
    ):
        loss = float(bridge(**given).loss.detach())
        assert abs(loss - want) <= TOLERANCE * want
    plain = bridge(**inputs).loss
    assert torch.equal(bridge(**inputs, loss_weights=torch.ones(2, 23)).loss.float(), plain.float())


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # with and without whole logits
def test_unchanged_models(family: str) -> None:
    model, inputs = causal_model(family), inputs_of("packed")
    weights = weights_like(inputs["input_ids"])
    want = weighted_mean(unsharded(model, two_rows("packed"))[2], weights.roll(-1, 1))
    with sequence_parallel(model, **PLACED) as sp:
        shard, own = weighted_inputs({**inputs, "loss_weights": weights}, **PLACED)
        assert sp.fused == (family == "llama")
        assert abs(float(sp.loss(shard, weights=own).detach()) - want) <= TOLERANCE * want


def test_documents_alike(bridge: BridgedCausalLM) -> None:
    # case H26: weights of one over a document's targets make the mean over documents of their means
    inputs, logits = inputs_of("packed"), unsharded(causal_model("llama"), two_rows("packed"))[2]
    weights, means = torch.zeros(2, 23, dtype=torch.float64), []
    for row, edges in enumerate(CUTS["packed"]):
        for a, b in pairwise(edges):
            own = targets()[row, a:b]
            number = int((own != -100).sum())
            if number:
                weights[row, a:b] = 1 / number
                means.append(float(F.cross_entropy(logits[row, a:b], own, ignore_index=-100)))
    loss = float(bridge(**inputs, loss_weights=weights).loss.detach())
    assert abs(loss - sum(means) / len(means)) <= TOLERANCE * loss


def test_nothing_that_counts(bridge: BridgedCausalLM) -> None:
    # cases H22, D12: exactly zero, and connected
    bridge.zero_grad()
    loss = bridge(**inputs_of("packed"), loss_weights=torch.zeros(2, 23)).loss
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(p.grad is not None and not p.grad.any() for p in bridge.parameters())


EXAMPLES = [
    {"input_ids": [3, 4, 5], "labels": [-100, 4, 5], "loss_weights": [0.5, 1.0, 2.0]},
    {"input_ids": [6, 7], "labels": [6, 7], "loss_weights": [3.0, 4.0]},
]


def test_collators() -> None:
    without = [{k: v for k, v in example.items() if k != "loss_weights"} for example in EXAMPLES]
    for collate, want in ((padded, [[0.5, 1, 2], [3, 4, 0]]), (flattened, [[0.5, 1, 2, 3, 4]])):
        assert WeightedCollator(collate)(EXAMPLES)["loss_weights"].tolist() == want
        assert "loss_weights" not in WeightedCollator(collate)(without)
    merged = DealtCollator(padded, 2, 1)(EXAMPLES)
    assert merged["loss_weights"].tolist() == [[0.5, 1, 2], [3, 4, 0]]
    assert total_weight(merged) == 1 + 2 + 4

    def own(examples: list[Any]) -> dict[str, Tensor]:
        batch = padded(examples)
        return {**batch, "loss_weights": batch["labels"].clamp(min=0) / 10}

    assert DealtCollator(own, 2, 1)(without)["loss_weights"][1].tolist() == pytest.approx([0.6, 0.7, 0])


def test_refusals(bridge: BridgedCausalLM) -> None:
    inputs = inputs_of("packed")
    for weights, match in (
        (torch.ones(2, 22), r"loss_weights=\(2, 22\) must have one number for each"),
        ([1.0] * 23, "loss_weights=list must have"),
        (-torch.ones(2, 23), "at least 0"),
        (torch.full((2, 23), float("nan")), "finite"),
    ):
        with pytest.raises(ValueError, match=match):
            bridge(**inputs, loss_weights=weights)
    with pytest.raises(ValueError, match="must come with labels"):
        bridge(input_ids=inputs["input_ids"], loss_weights=torch.ones(2, 23))
    with pytest.raises(ValueError, match="Use weighted_inputs"):
        shard_inputs({**inputs, "loss_weights": torch.ones(2, 23)}, **PLACED)
    long = {**EXAMPLES[0], "loss_weights": [1.0] * 4}
    with pytest.raises(ValueError, match="got 4 for 3 tokens"):
        WeightedCollator(padded)([long, EXAMPLES[1]])
    with pytest.raises(ValueError, match="got 0 for 2 tokens"):
        WeightedCollator(padded)([EXAMPLES[0], {k: EXAMPLES[1][k] for k in ("input_ids", "labels")}])
    with pytest.raises(ValueError, match="a collator that moves tokens"):
        WeightedCollator(lambda examples: padded(examples[::-1]))(EXAMPLES)
    batch = padded(EXAMPLES)
    with pytest.raises(ValueError, match="in every batch or in none"):
        merge([batch, {k: v for k, v in batch.items() if k != "loss_weights"}])
    for other in ("shift_labels", "attention_mask"):  # case H70: no labels, no loss, and no word of it
        with pytest.raises(ValueError, match="must hold labels, not shifted"):
            merge([{"input_ids": batch["input_ids"], other: batch["labels"].clamp(min=0, max=1)}])
    with pytest.raises(ValueError, match=r"position_ids=\(3, 2, 3\)"):  # case P66
        merge([{**batch, "position_ids": torch.arange(3).expand(3, 2, 3)}])
    stretched = torch.tensor([[0, 2, 4], [0, 1, 1]])
    with pytest.raises(ValueError, match="rise by anything but 1"):
        merge([{**batch, "position_ids": stretched}])
