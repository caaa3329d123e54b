"""Options of a training step by name, and what they are called on a command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from usp.models.plan.memory_parts import Memory

OPTIONS = ("remat", "group", "offload", "mlp_tile", "head_chunks")  # of `usp.models.loss`
NOTHING = Memory((), 0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of a step that fits, why they are these, and what the step then takes."""

    remat: str | tuple[str, ...] = "none"
    group: int = 1
    offload: str = "none"
    mlp_tile: int | None = None
    head_chunks: int = 1
    moments: str = "device"
    reasons: tuple[str, ...] = ()
    memory: Memory = NOTHING

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `usp.models.loss`; offload="host" also wants an `arena`. `moments` is not one
        of them: `usp.adamw_init` takes an arena for "host"."""
        return {name: getattr(self, name) for name in OPTIONS}

    def words(self) -> dict[str, str]:
        """What differs from the defaults, and remat, by option name, as `usp train` and `usp bench` take it.

        `stored`: the last layers, which keep everything; the others do as remat says. Raises ValueError for
        another order of layers.
        """
        names = (self.remat,) if isinstance(self.remat, str) else self.remat
        stored = 0 if names[0] == "none" else names.count("none")
        if names != (names[0],) * (len(names) - stored) + ("none",) * stored:
            raise ValueError(f"remat={names} must be one name, then none for the last layers. Order it so.")
        found = {"remat": names[0]} | ({"stored": str(stored)} if stored else {})
        found |= {"group": str(self.group)} if self.group > 1 else {}
        found |= {"offload": "host"} if self.offload == "host" else {}
        found |= {"mlp_tile": str(self.mlp_tile)} if self.mlp_tile else {}
        found |= {"head_chunks": str(self.head_chunks)} if self.head_chunks > 1 else {}
        return found | ({"moments": "host"} if self.moments == "host" else {})

    def describe(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.words().items())


def with_stored(remat: str, stored: int, num_layers: int) -> str | tuple[str, ...]:
    """`remat` of every layer but the last `stored`, which keep everything. ValueError for too many."""
    if not stored:
        return remat
    if stored >= num_layers:
        raise ValueError(
            f"stored={stored} must be less than the model's layers, got num_layers={num_layers}. Lower it, "
            f"or use remat=none."
        )
    return (remat,) * (num_layers - stored) + ("none",) * stored


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
