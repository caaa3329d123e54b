"""Scaling over GPUs, in parts that end within a limit: every scheme, at so many tokens per GPU and in all.

Each part is one launch. The last ones take all layers of the model through one step, of a row as long as a
part has time for. The longest rows of all are the plan's: a step of them takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from usp import models
from usp.mesh import TABLES
from usp.models import LlamaConfig
from usp.tools.bench.job import PLAN, Row, Setting
from usp.tools.bench.memory import chunks_of
from usp.tools.bench.shape import guess_seconds, shape
from usp.tools.bench.timing import repeats
from usp.tools.flops import flops_per_token

COUNTS = (1, 2, 4, 8)
PART_SECONDS, PART_LIMIT = 500.0, 580.0  # that a part is planned for, and that it may take
START_SECONDS, EACH_SECONDS = 90.0, 15.0  # of a part, with what compiles, and of one setting
BAR = 0.95  # weak scaling from 2 to 8 GPUs
CHUNKS = 4
WHOLE = "all layers"


class Published(NamedTuple):
    """tokens/s per GPU of a whole training step, Llama-3-8B with all of its layers."""

    who: str
    seq_len: int
    tokens_per_s: float
    machine: str


PUBLISHED = (
    Published("UPipe", 131072, 2281, "8 H100"),
    Published("UPipe", 1048576, 473, "8 H100"),
    Published("UPipe", 2097152, 246, "8 H100"),
    Published("DeepSpeed ALST", 3700000, 75, "8 H100"),
)


class Part(NamedTuple):
    """One launch: settings at one length on so many processes; `seconds`: about what it takes."""

    processes: int
    layers: int
    seq_len: int
    settings: tuple[Setting, ...]
    seconds: float

    def asked(self) -> dict[str, Any]:
        """What a `Job` has of it."""
        names = ("processes", "layers", "settings")
        return {**{name: getattr(self, name) for name in names}, "seq_lens": (self.seq_len,)}


def schemes(cfg: LlamaConfig, n: int, like: int) -> Iterator[Setting]:
    """Those that exist on `n` processes, with the fastest options that fit on `like` (0: on these)."""
    yield Setting(label=f"ulysses {n}", variant="ulysses", remat=PLAN, like=like)
    chunks = chunks_of(cfg, n, CHUNKS)
    if chunks > 1:
        label = f"ulysses {n}, {chunks} head chunks"
        yield Setting(label=label, variant="head chunks", remat=PLAN, head_chunks=chunks, like=like)
    if n > 1:
        label = f"ulysses {n // 2} x ring 2"
        yield Setting(label=label, variant="ulysses x ring", ring=2, remat=PLAN, like=like)
        yield Setting(label=f"odysseus {n}", variant="odysseus", table="odysseus", remat=PLAN, like=like)


def parts(
    cfg: LlamaConfig, counts: Sequence[int], lengths: Sequence[int], steps: int, device: str
) -> list[Part]:
    """`lengths`: tokens per GPU, and in all. Settings of one length share a launch while time allows."""
    per_gpu, whole = lengths
    found: list[Part] = []
    for n in counts:
        for seq_len in dict.fromkeys((per_gpu * n, whole)):
            step = guess_seconds(cfg, seq_len, n, device)
            each = step * sum(repeats(step, steps)) + EACH_SECONDS
            part = Part(n, cfg.num_layers, seq_len, (), START_SECONDS)
            for setting in schemes(cfg, n, 2 if n > 2 and seq_len == per_gpu * n else 0):
                if part.settings and part.seconds + each > PART_SECONDS:
                    found.append(part)
                    part = Part(n, cfg.num_layers, seq_len, (), START_SECONDS)
                part = part._replace(settings=(*part.settings, setting), seconds=part.seconds + each)
            found.append(part)
    return found


def whole_part(cfg: LlamaConfig, n: int, per_gpu: int, device: str) -> Part:
    """All layers of the model: a step of the longest row, from `per_gpu` tokens in all to twice as many on
    each of several, that a part has time for. One process alone has the optimizer's moments on the host."""
    seq_len, most = per_gpu, per_gpu * (2 * n if n > 1 else 1)

    def seconds(seq_len: int) -> float:
        step = guess_seconds(cfg, seq_len, n, device)
        return START_SECONDS + EACH_SECONDS + step * sum(repeats(step, 1))

    while 2 * seq_len <= most and seconds(2 * seq_len) <= PART_SECONDS:
        seq_len *= 2
    moments = "host" if n == 1 else "device"
    one = Setting(label=f"ulysses {n}, {cfg.num_layers} layers", variant=WHOLE, remat=PLAN, moments=moments)
    return Part(n, cfg.num_layers, seq_len, (one,), seconds(seq_len))


def weak(rows: Sequence[Row], per_gpu: int) -> list[Row]:
    """Per scheme: model TFLOP/s per GPU at `per_gpu` tokens each, on the most GPUs over that on 2."""
    found = []
    for variant in dict.fromkeys(row.get("variant") for row in rows):
        own = {
            row["world"]: row["tflops_gpu"]
            for row in rows
            if row.get("variant") == variant
            and "tflops_gpu" in row
            and row["seq_len"] == per_gpu * row["world"]
        }
        most = max(own, default=0)
        if 2 in own and most > 2:
            found.append({"variant": variant, "from": 2, "to": most, "ratio": own[most] / own[2]})
    return found


def published() -> list[Row]:
    """Their tokens/s as model TFLOP/s per GPU, to stand beside a model with fewer layers."""
    cfg = shape("llama-3-8b", 32)
    return [
        {**one._asdict(), "tflops_gpu": flops_per_token(cfg, one.seq_len) * one.tokens_per_s / 1e12}
        for one in PUBLISHED
    ]


def foretold_longest(cfg: LlamaConfig, n: int, gpu_memory: int, host_memory: int) -> tuple[int, str]:
    """Tokens in all that fit on `n` GPUs, and the settings, by the plan; 0 where nothing fits."""
    sizes = {"dp": 1, "ring": 1, "ulysses": n}
    try:
        tokens, settings = models.longest(
            cfg, TABLES["usp"], sizes, gpu_memory, host_memory, compile=True, moments="device"
        )
    except ValueError:
        return 0, "nothing fits"
    return tokens, settings.describe()


def lines(rows: Sequence[Row], per_gpu: int) -> Iterator[str]:
    """What is said under the table."""
    for one in weak(rows, per_gpu):
        verdict = "meets" if one["ratio"] >= BAR else "misses"
        if one["to"] < COUNTS[-1]:
            verdict = f"on {one['to']} GPUs only, so far: {COUNTS[-1]} are needed for"
        yield (
            f"  {one['variant']}: weak scaling {one['ratio']:.3f} from 2 to {one['to']} GPUs at {per_gpu} "
            f"tokens per GPU; {verdict} the bar of {BAR}"
        )
    yield "  published, Llama-3-8B with 32 layers:"
    whole = {(row["world"], row["seq_len"]): row for row in rows if row.get("variant") == WHOLE}
    for row in published():
        own = whole.get((COUNTS[-1], row["seq_len"]), {}).get("tokens_per_s_gpu")
        ours = "" if own is None else f"; ours {own:.0f}, {own / row['tokens_per_s']:.2f} times as many"
        yield (
            f"    {row['who']:<15} {row['seq_len']:>8} tokens on {row['machine']}: {row['tokens_per_s']:.0f} "
            f"tokens/s and {row['tflops_gpu']:.0f} model TFLOP/s per GPU{ours}"
        )
