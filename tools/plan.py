"""`usp plan MODEL --seq-len N ...`: where tensors live, what a step sends and holds. It only prints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from usp import models
from usp.arena import Arena
from usp.mesh import TABLES, Table
from usp.models.files.writer import parse_size
from usp.models.options import check_how
from usp.models.plan.choose import usable
from usp.models.plan.local import Local, local
from usp.models.plan.settings import Settings, gib
from usp.models.plan.textbook import textbook
from usp.models.plan.traffic import ModelTraffic
from usp.models.plan.traffic_attention import ring_elements
from usp.models.plan.traffic_kinds import Traffic
from usp.ring import ring_bytes
from usp.tools.config_plan import Plan
from usp.tools.options import asked_for, check_options
from usp.tools.plan_options import as_options
from usp.tools.presets import GPUS, find_model
from usp.tools.rates import CALIBRATE, HOW, Rates, default_path, step_time, time_text
from usp.tools.setup import check_axes, check_rows, positions_note, rows_of_step

COLUMNS = ("tokens", "residual", "attn_x", "q", "kv", "mlp_x")
WEIGHTS = ("embed", "wq", "wo", "w_gate", "w_down", "norm")
SHOWN_REASONS = 5
BOOK = (
    "  by the book, a layer's forward and backward without what is run again or chunks of heads (an element "
    "has i bytes, in a sum w)"
)
LASTING = ("parameters", "moments", "tokens and positions")


def plan(cfg: Plan) -> str:
    """The whole answer as text. Raises ValueError for what does not go together."""
    check(cfg)
    model, table = find_model(cfg.model), TABLES[cfg.table]
    sizes = {"dp": cfg.dp, "ring": cfg.ring, "ulysses": cfg.ulysses}
    models.check_layout(model, mesh=sizes, table=table, seq_len=cfg.seq_len)
    gpu = parse_memory("gpu-memory", cfg.gpu_memory) if cfg.gpu_memory else GPUS[cfg.gpu]
    host = parse_memory("host-memory", cfg.host_memory)
    given: dict[str, Any] = {
        "batch": rows_of_step(cfg) // cfg.accumulate,
        "accumulate": cfg.accumulate,
        "dtype": getattr(torch, cfg.dtype),
        "compile": cfg.compile,
    }
    seq_len = cfg.seq_len
    if cfg.longest:
        seq_len, settings = models.longest(model, table, sizes, gpu, host, moments=cfg.moments, **given)
    elif cfg.remat == "auto":
        assert seq_len is not None
        settings = models.choose_settings(
            model, table, sizes, seq_len, gpu, host, moments=cfg.moments, **given
        )
    else:
        home = "host" if cfg.moments == "host" else "device"
        settings = Settings(**asked_for(cfg, model.num_layers), moments=home)
    assert seq_len is not None
    options = settings.options()
    how: Any = {**options, "arena": Arena() if settings.offload == "host" else None}
    check_how(model, table=table, mesh=sizes, options=how)
    memory = models.training_memory(
        model, table, sizes, seq_len=seq_len, moments=settings.moments, **given, **options
    )
    del given["accumulate"]
    traffic = models.model_traffic(model, table, sizes, seq_len=seq_len, **given, **options)
    where = local(model, table, sizes, batch=given["batch"], seq_len=seq_len)
    room = usable(gpu)
    fits = memory.peak.nbytes <= room and memory.host <= host
    verdict = (
        f"{'fits' if fits else 'DOES NOT FIT'}: {gib(memory.peak.nbytes)} at the peak ({memory.peak.name}) "
        f"of {gib(gpu)}, {gib(room)} of it usable; host {gib(memory.host)} of {gib(host)}"
    )
    return "\n\n".join(
        [
            headline(cfg, model, seq_len, settings),
            verdict,
            how_long(cfg, where, traffic, memory, options),
            as_options(cfg, model, seq_len, settings),
            placements(table, sizes),
            moves(traffic, where, given["dtype"], options["head_chunks"]),
            held(memory),
        ]
    )


def how_long(
    cfg: Plan, where: Local, traffic: ModelTraffic, memory: models.Memory, options: Mapping[str, Any]
) -> str:
    """The time of a step, where the rates of such GPUs are known."""
    path = cfg.rates or default_path()
    if not path.is_file() and cfg.rates is None:
        return HOW
    rates = Rates.read(path)
    if cfg.gpu_memory is None and cfg.gpu not in re.split(r"\W+", rates.device.lower()):
        return f"no step time: {path} has the rates of {rates.device}, not of {cfg.gpu}. {CALIBRATE}"
    pieces = step_time(
        where, traffic, memory, rates, dtype=getattr(torch, cfg.dtype), compile=cfg.compile,
        accumulate=cfg.accumulate,
        **{name: options[name] for name in ("remat", "group", "mlp_tile", "head_chunks")},
    )  # fmt: skip
    return time_text(pieces, rates, cfg.dp * cfg.ring * cfg.ulysses, rows_of_step(cfg) * where.seq_len)


def check(cfg: Plan) -> None:
    if cfg.longest and cfg.seq_len is not None:
        raise ValueError(
            f"seq_len={cfg.seq_len} must be left out with --longest, which finds it. Give one of them."
        )
    if not cfg.longest and cfg.seq_len is None:
        raise ValueError("seq_len=None must be a number of tokens. Give --seq-len, or --longest to find it.")
    for name in ("dp", "ring", "ulysses", "accumulate"):
        if getattr(cfg, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"{name}={getattr(cfg, name)} must be at least 1. Change --{flag}.")
    if cfg.table not in TABLES:
        raise ValueError(
            f"table={cfg.table} must be one of {', '.join(TABLES)}. Change --table; for one "
            f"of your own call usp.models.model_traffic and usp.models.training_memory."
        )
    check_axes(cfg.table, ring=cfg.ring, ulysses=cfg.ulysses)
    if cfg.gpu not in GPUS:
        raise ValueError(f"gpu={cfg.gpu} must be one of {', '.join(GPUS)}. Or give --gpu-memory.")
    check_rows(cfg)
    check_options(cfg)
    if cfg.longest and cfg.remat != "auto":
        raise ValueError(f"longest=True must choose the settings, got remat={cfg.remat}. Leave --remat out.")


def parse_memory(name: str, text: str) -> int:
    if text.strip() in ("0", "0GB"):
        return 0
    try:
        return parse_size(text)
    except ValueError:
        raise ValueError(f"{name}={text} must be a size such as 141GB or 80GiB. Change --{name}.") from None


def headline(cfg: Plan, model: models.LlamaConfig, seq_len: int, settings: Settings) -> str:
    ranks, parts = cfg.dp * cfg.ring * cfg.ulysses, cfg.ring * cfg.ulysses
    steps = f" in {cfg.accumulate} parts" if cfg.accumulate > 1 else ""
    gpus = f"{ranks} GPU{'s' if ranks > 1 else ''}"
    lines = [
        f"{cfg.model}: {rows_of_step(cfg)} x {seq_len} tokens{steps} on {gpus} (dp "
        f"{cfg.dp}, ring {cfg.ring}, ulysses {cfg.ulysses}), {-(-seq_len // parts)} tokens of a row a rank",
        f"settings: {settings.describe()}",
    ]
    lines += [f"  too much: {reason}" for reason in settings.reasons[:-1][-SHOWN_REASONS:]]
    note = positions_note(model, seq_len)
    return "\n".join(lines if note is None else [*lines, note])


def placements(table: Table, sizes: Mapping[str, int]) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    lines = [f"table {table.name!r} on {mesh}"]
    lines += [f"  {name:<9} {getattr(table, name)}" for name in COLUMNS]
    lines += [f"  {name:<9} at rest {table.rest[name]!s:<42} in use {table.use[name]}" for name in WEIGHTS]
    return "\n".join(lines)


def moves(traffic: ModelTraffic, where: Local, dtype: torch.dtype, head_chunks: int) -> str:
    lines = ["sent by one rank"]
    for layer, num in Counter(traffic.layers).items():
        lines.append(f"  each of {num} layers, forward")
        lines += rows(layer.forward, where.sizes)
        lines.append(f"  each of {num} layers, backward, with what is run again")
        lines += rows(layer.backward, where.sizes)
    lines.append("  around the layers, forward and backward")
    lines += rows((*traffic.around.forward, *traffic.around.backward), where.sizes)
    if traffic.update:
        lines.append("  update")
        lines += rows(merged(traffic.update), where.sizes)
    total = sum(t.nbytes for t in (*traffic.forward, *traffic.backward, *traffic.update))
    lines.append(f"  whole step: {gib(total)}")
    lines += [f"  {line}" for line in ring_choice(where, dtype, head_chunks)]
    formulas = textbook(where, dtype)
    lines += [BOOK] if formulas else []
    for f in formulas:
        there, back = size(f.forward), size(f.backward)
        lines.append(
            f"    {f.scheme:<15} {'+'.join(f.axes):<16} {there:>11} {back:>11}  {f.text} ({f.source})"
        )
    return "\n".join(lines)


def rows(traffic: Iterable[Traffic], sizes: Mapping[str, int]) -> list[str]:
    found = []
    for t in traffic:
        over = "+".join(f"{axis} {sizes[axis]}" for axis in t.axes)
        found.append(f"    {t.what:<28} {t.calls:>3} {t.kind:<15} {over:<24} {size(t.nbytes):>11}")
    return found or ["    nothing"]


def merged(traffic: Iterable[Traffic]) -> list[Traffic]:
    """All gradients in one row."""
    found: dict[tuple[str, str, tuple[str, ...]], Traffic] = {}
    for t in traffic:
        what = "gradients" if t.what.startswith("gradient") else t.what
        old = found.get((what, t.kind, t.axes), Traffic(what, t.kind, t.axes, 0, 0))
        found[what, t.kind, t.axes] = old._replace(calls=old.calls + t.calls, nbytes=old.nbytes + t.nbytes)
    return list(found.values())


def ring_choice(where: Local, dtype: torch.dtype, head_chunks: int) -> list[str]:
    if where.degree == 1:
        return []
    both = ring_bytes(ring_elements(where, head_chunks), dtype.itemsize, where.degree)
    pays, heads = where.gathers(head_chunks), where.ring_heads(head_chunks)
    of = "" if head_chunks == 1 else " of a chunk"
    return [
        f"ring of {where.degree}, forward and backward: p2p {size(both.p2p)}, gather {size(both.gather)}; "
        f"{'gather' if pays else 'p2p'}, as all keys{of} ({where.degree} x {heads.kv} heads) take "
        f"{'no more' if pays else 'more'} room than q ({heads.q} heads)"
    ]


def held(memory: models.Memory) -> str:
    lines = ["memory of one rank, by moment (what the allocator loses is not in it)"]
    for phase in memory.phases:
        own = (f"{name} {gib(n)}" for name, n in phase.parts.items() if name not in LASTING and n >= 2**27)
        mark = "  <- peak" if phase is memory.peak else ""
        lines.append(f"  {phase.name:<24} {gib(phase.nbytes):>11}{mark}")
        lines.append(f"    {', '.join(own)}")
    lines.append(f"at the peak ({memory.peak.name})")
    lines += [f"  {name:<28} {gib(nbytes):>11}" for name, nbytes in memory.peak.parts.items() if nbytes]
    lines.append(f"  {'on the host':<28} {gib(memory.host):>11}")
    return "\n".join(lines)


def size(nbytes: int) -> str:
    return gib(nbytes) if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
