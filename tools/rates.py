"""Rates that a machine was measured to work at, and how long a step would take at them.

`usp bench --calibrate` writes them to usp/rates.json in $XDG_CACHE_HOME (or ~/.cache); `usp plan` reads them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch

from usp.models.attended import mean_keys
from usp.models.plan.local import Local
from usp.models.plan.memory_parts import Memory
from usp.models.plan.segments import segments
from usp.models.plan.traffic import ModelTraffic
from usp.models.plan.traffic_kinds import SHIFT, Traffic

UPDATE_BYTES = 28  # AdamW in float32 reads parameter, gradient and moments, and writes all but the gradient
CALIBRATE = "Run `usp bench --calibrate` on such a machine; elsewhere give what it writes as --rates."
HOW = f"no step time: the rates of a machine are not known. {CALIBRATE}"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one process among `processes`, each with a device of this name. FLOP/s, and bytes per second.

    memory: read and written together. all_to_all, all_gather, reduce_scatter: what one rank sends; None
    where there was one process.
    """

    device: str
    processes: int
    kernel: str
    matmul: float
    attention_forward: float
    attention_backward: float
    memory: float
    to_host: float
    from_host: float
    all_to_all: float | None = None
    all_gather: float | None = None
    reduce_scatter: float | None = None

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
        os.replace(fresh, path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ValueError for a file that holds something else."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as e:
            raise ValueError(f"rates={path} must be written by usp bench --calibrate, got: {e}.") from None


def default_path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "usp" / "rates.json"


class Piece(NamedTuple):
    """Seconds of one kind of work in a step; `hidden`: behind the work that computes, where it is shorter."""

    name: str
    seconds: float
    hidden: bool = False


def step_time(
    where: Local,
    traffic: ModelTraffic,
    memory: Memory,
    rates: Rates,
    *,
    dtype: torch.dtype,
    compile: bool,
    accumulate: int,
    remat: str | Sequence[str],
    group: int,
    mlp_tile: int | None = None,
    head_chunks: int = 1,
) -> tuple[Piece, ...]:
    """What one rank's step takes, by kind. Waits, starts and gaps are not in it."""
    cfg, table, layers = where.cfg, where.table, where.cfg.num_layers
    runs = _again(remat, group, layers)
    cut = math.prod(where.sizes[a] for a in table.use["w_gate"][0])
    features, mlp_tokens = cfg.intermediate_size / cut, where.tokens(table.mlp_x)
    down = cfg.hidden_size * features * mlp_tokens
    head_width = cfg.hidden_size * cfg.head_dim * where.tokens(table.attn_x) / where.ways
    qkv, out = head_width * (cfg.num_heads + 2 * cfg.num_kv_heads), head_width * cfg.num_heads
    head = cfg.vocab_size * where.tokens(table.tokens)
    # a layer run again ends before its last product, whose value nothing reads; the backwards of tiles of the
    # MLP and of chunks of heads make again what they do not keep, unless that was why the layer was run
    products = (3 * layers + runs.again) * (qkv + out + 3 * down) - runs.unread * down - runs.searched * qkv
    products += 0 if mlp_tile is None else (layers - runs.unread) * 2 * down
    products += 0 if head_chunks == 1 else (layers - runs.kept) * qkv
    products = 2 * products + 6 * head * cfg.hidden_size
    attend = 4 * where.rows * where.seq_len / where.degree * where.heads.q * cfg.head_dim  # for each key seen
    forward, backward = _keys(where, [*range(layers), *runs.attended]), 2.5 * _keys(where, range(layers))
    # two norms, rotation, activation: what each reads and writes; the backward twice that
    width = 4 * cfg.hidden_size + 2 * (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim + 3 * features
    fused = 1 if compile else 3
    passes = (3 * layers + runs.again) * width * mlp_tokens * fused + 2 * head
    sent, copies = (*traffic.forward, *traffic.backward), 1 / rates.to_host + 1 / rates.from_host
    exposed = [t for t in sent if not _travels_behind(t)]
    behind = [t for t in sent if _travels_behind(t)]
    parameters = memory.peak.parts["parameters"]
    update = parameters / 4 * UPDATE_BYTES
    moments = 0 if "moments" in memory.peak.parts else 2 * parameters  # that live on the host
    found = [
        Piece("matrix products", accumulate * products / rates.matmul),
        Piece("attention, forward", accumulate * forward * attend / rates.attention_forward),
        Piece("attention, backward", accumulate * backward * attend / rates.attention_backward),
        Piece("passes over memory", accumulate * passes * dtype.itemsize / rates.memory),
        Piece("exchanges", accumulate * _sent(exposed, rates) + _sent(traffic.update, rates)),
        Piece("update", update / rates.memory),
        Piece("weights, gradients and keys sent", accumulate * _sent(behind, rates), hidden=True),
        Piece("copies to the host and back", accumulate * (memory.host - moments) * copies, hidden=True),
        Piece("moments to the GPU and back", moments * copies),
    ]
    return tuple(piece for piece in found if piece.seconds > 0)


def time_text(pieces: Sequence[Piece], rates: Rates, ranks: int, tokens: int) -> str:
    """The time of a step on `ranks` GPUs, and what it is made of. `tokens`: of the whole step."""
    seconds = total(pieces)
    lines = [
        f"about {seconds:.3g} s a step, {tokens / seconds / ranks:.3g} tokens/s per GPU, at the rates of "
        f"{rates.device} as measured with {rates.processes} processes (waits and gaps are not in it)"
    ]
    lines += [f"  {p.name:<32} {p.seconds:9.3g} s{', behind the rest' if p.hidden else ''}" for p in pieces]
    if ranks > 1 and rates.all_to_all is None:
        lines.append("  what is sent is not in it: the rates were measured on one process")
    return "\n".join(lines)


def total(pieces: Iterable[Piece]) -> float:
    """Seconds; of what is hidden only what is longer than the work that it hides behind."""
    pieces = tuple(pieces)
    shown = sum(p.seconds for p in pieces if not p.hidden)
    return max([shown, *(p.seconds for p in pieces if p.hidden)])


def _keys(where: Local, layers: Sequence[int]) -> float:
    """Keys that a query sees in these layers together, on average over its row."""
    return len(layers) * mean_keys(where.cfg, where.seq_len, layers)


class _Again(NamedTuple):
    """How often layers are run again; how often the last value is not read then, once for each such layer;
    layers run again with attention's result kept, and how often only to find the next input: without q, k, v;
    and the layers whose attention is run again, named once each time."""

    again: int
    unread: int
    kept: int
    searched: int
    attended: list[int]


def _again(remat: str | Sequence[str], group: int, num_layers: int) -> _Again:
    again, unread, kept, searched = 0, 0, 0, 0
    attended: list[int] = []
    for part in segments(remat, num_layers):
        if part.remat == "none":
            continue
        own = range(part.start, part.stop)
        # all of a group but its last layer are run once more
        twice = [i for i in own[:-1] if (i - part.start + 1) % group]
        again, unread = again + len(own) + len(twice), unread + len(own)
        if part.remat == "attention":
            kept, searched = kept + len(own), searched + len(twice)
        else:
            attended += [*own, *twice]
    return _Again(again, unread, kept, searched, attended)


def _travels_behind(t: Traffic) -> bool:
    """What is sent while a layer computes: its weights and their gradients, and keys around a ring."""
    return t.what == "layer" or t.kind == SHIFT


def _sent(traffic: Iterable[Traffic], rates: Rates) -> float:
    """Seconds; what was not measured itself goes by the all-to-all's rate, and costs nothing without one."""
    seconds = 0.0
    for t in traffic:
        own = {"all_gather": rates.all_gather, "reduce_scatter": rates.reduce_scatter}.get(t.kind)
        rate = own or rates.all_to_all
        seconds += t.nbytes / rate if rate else 0.0
    return seconds
