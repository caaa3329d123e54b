"""What is handed through a model's keyword arguments without anyone on the way looking inside."""

from __future__ import annotations

from torch import Tensor

from usp import Shard


class Handed:
    """A shard, and the weights of its targets, that engines pass on: they move and cast tensors they find."""

    __slots__ = ("value", "weights")

    def __init__(self, value: Shard, weights: Tensor | None = None) -> None:
        self.value, self.weights = value, weights
