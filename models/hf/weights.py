"""Weights of targets: `loss_weights`, one number a token, from a data set's column to the loss of a rank.

Loss: sum of weight * token loss, over the sum of weights, both over all micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from usp.batch import IGNORE

WEIGHTS = "loss_weights"
"""Name of the column and of the argument."""


def checked_weights(inputs: Mapping[str, Any], shape: tuple[int, ...]) -> Tensor | None:
    """The weights [B, S] of a collated batch, on the CPU; None: it has none, and all targets count alike."""
    given = inputs.get(WEIGHTS)
    if given is None:
        return None
    if not isinstance(given, Tensor) or tuple(given.shape) != shape:
        got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(
            f"{WEIGHTS}={got} must have one number for each of input_ids={shape}. Pad them as the tokens are."
        )
    weights = given.cpu().to(torch.promote_types(given.dtype, torch.float32))
    if not bool(((weights >= 0) & weights.isfinite()).all()):
        raise ValueError(
            f"{WEIGHTS} must be finite and at least 0, as their sum divides the loss, got "
            f"{float(weights.min())} to {float(weights.max())}. Change them."
        )
    return weights


def target_weights(weights: Tensor, targets: Tensor, *, shifted: bool) -> Tensor:
    """[B, S], the weight of the target at each place: that of the next token. 0 where there is no target.

    `shifted`: the caller has shifted them with the targets.
    """
    moved = weights if shifted else weights.roll(-1, dims=1)
    return moved.where(targets != IGNORE, 0.0)


class WeightedCollator:
    """Any collator of tokens, made to carry the column `loss_weights`: padded or laid end to end like them.

    The collator inside sees the examples without it. Raises ValueError where an example has another number of
    weights than tokens, or the collator cuts, reorders or drops tokens.
    """

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Any]]) -> None:
        self.collate = collate

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        held = [example.get(WEIGHTS) if isinstance(example, Mapping) else None for example in examples]
        if all(each is None for each in held):
            return dict(self.collate(list(examples)))
        weights = [_of(example, each) for example, each in zip(examples, held, strict=True)]
        batch = dict(
            self.collate([{k: v for k, v in example.items() if k != WEIGHTS} for example in examples])
        )
        if WEIGHTS in batch:
            raise ValueError(
                f"{WEIGHTS} must come from the column or from the collator, got both. Rename the column."
            )
        return {**batch, WEIGHTS: _like_tokens(batch["input_ids"], weights, examples)}


def _of(example: Mapping[str, Any], weights: Any) -> Tensor:
    number = 0 if weights is None else len(weights)
    if number != len(example["input_ids"]):
        raise ValueError(
            f"{WEIGHTS} of an example must have one number a token, got {number} for "
            f"{len(example['input_ids'])} tokens. Cut or extend both alike, before training."
        )
    return torch.as_tensor(weights)


def _like_tokens(tokens: Tensor, weights: Sequence[Tensor], examples: Sequence[Mapping[str, Any]]) -> Tensor:
    """The weights where the collator put the tokens that they belong to."""
    num_rows, length = tokens.shape
    rows = list(weights) if num_rows == len(weights) else [torch.cat(list(weights))]
    sources = [torch.as_tensor(example["input_ids"]) for example in examples]
    whole = sources if num_rows == len(weights) else [torch.cat(sources)]
    fits = num_rows == len(rows) and all(
        len(row) <= length and torch.equal(tokens[i, : len(row)].cpu(), source)
        for i, (row, source) in enumerate(zip(rows, whole, strict=True))
    )
    if not fits:
        raise ValueError(
            f"input_ids={tuple(tokens.shape)} must hold the {len(weights)} examples padded on the right or "
            f"end to end, got a collator that moves tokens. Let it make {WEIGHTS} itself."
        )
    return torch.stack([pad(row, (0, length - len(row))) for row in rows])
