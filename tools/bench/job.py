"""What one launch of processes is asked to measure, as it travels to them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from usp.mesh import TABLES

Row = dict[str, Any]
GIB = 2**30
PLAN = "plan"
NO_OPTION = ("label", "variant", "like")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How our own layers run, by the names of the model's options.

    remat="plan": the fastest that fits, on the table, mesh and chunks of heads given here; `like`: on so
    many processes, for as many tokens each, so that the same is chosen for every number of them. stored: so
    many of the last layers keep everything. compile=None: on a GPU.
    """

    label: str
    variant: str = ""
    table: str = "usp"
    ring: int = 1
    remat: str = "attention"
    stored: int = 0
    group: int = 1
    offload: str = "none"
    mlp_tile: int | None = None
    head_chunks: int = 1
    moments: str = "device"
    compile: bool | None = None
    like: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """From name=value,name=value. Raises ValueError for what is no option or no value of one."""
        values: dict[str, Any] = {}
        known = [field.name for field in dataclasses.fields(cls) if field.name not in NO_OPTION]
        parts = text.split(",") if text else []
        if not all(part.strip() for part in parts):
            raise ValueError(
                f"setting={text!r} must be name=value,name=value without empty parts. If it was several "
                f"words, leave out the spaces, or quote it."
            )
        for part in parts:
            name, _, value = (word.strip() for word in part.partition("="))
            if name not in known:
                raise ValueError(f"setting={text!r} must use {', '.join(known)}, got {name!r}. Correct it.")
            words = {"None": None, "True": True, "False": False}
            values[name] = int(value) if value.isdigit() else words.get(value, value)
            fits: dict[str, Any] = {
                "table": str,
                "remat": str,
                "offload": str,
                "moments": str,
                "compile": bool,
                "mlp_tile": int | None,
            }
            if not isinstance(values[name], fits.get(name, int)):
                wanted = {str: "a name", bool: "True or False"}.get(fits.get(name, int), "a whole number")
                raise ValueError(f"setting={text!r} must give {name} {wanted}, got {value!r}. Correct it.")
        for name, allowed in (("table", tuple(TABLES)), ("moments", ("device", "host"))):
            if values.get(name, allowed[0]) not in allowed:
                raise ValueError(f"setting={text!r} must give {name} as one of {', '.join(allowed)}.")
        return cls(label=text, **values)


@dataclass(frozen=True, kw_only=True)
class Job:
    """`contender` measures `what` at these lengths, with each of `settings` (ours) or `variants` (peers').

    `window`: of every layer, in place of the model's own; `logs`: folder for what a launch says that ends
    early; `host_memory`: bytes for one process.
    """

    what: str
    contender: str
    model: str
    layers: int
    seq_lens: tuple[int, ...]
    processes: int
    device: str  # cuda or cpu
    window: int | None = None
    kernel: str = "auto"
    steps: int = 5
    limit: float = 900.0
    variants: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    batch_sizes: tuple[int, ...] = (1,)
    trace: str | None = None
    host_memory: int | None = None
    logs: str | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        fields["settings"] = tuple(Setting(**one) for one in fields["settings"])
        for name in ("seq_lens", "variants", "batch_sizes"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    def facts(self) -> Row:
        """What every row of this job says about itself."""
        names = ("what", "contender", "model", "layers", "device")
        found = {**{name: getattr(self, name) for name in names}, "world": self.processes}
        return found if self.window is None else {**found, "window": self.window}

    def expected(self) -> list[Row]:
        """A row for each that should come, as far as it is known before."""
        labels: list[Mapping[str, Any]] = [
            {"label": s.label, "variant": s.variant, "table": s.table, "ring": s.ring} for s in self.settings
        ]
        labels = labels or [{"label": variant, "variant": variant} for variant in self.variants] or [{}]
        return [{**label, "seq_len": seq_len} for label in labels for seq_len in self.seq_lens]


def gib_above(row: Row, peak: str, base: str) -> float | None:
    """What a peak holds beyond parameters and moments; None where it was not measured."""
    missing = row.get(peak) is None or row.get(base) is None
    return None if missing else (row[peak] - row[base]) / GIB
