"""What is handed through a model's keyword arguments without anyone on the way looking inside."""

from __future__ import annotations

from usp import Shard


class Handed:
    """A shard that engines pass on as it is: they move tensors they find in arguments to a device."""

    __slots__ = ("value",)

    def __init__(self, value: Shard) -> None:
        self.value = value
