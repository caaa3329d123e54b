"""`usp bench`: launches, rows, and what is made of them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product

from usp.tools.bench import memory, report, scaling
from usp.tools.bench.job import Job, Row
from usp.tools.bench.jobs import (
    Resources,
    all_parts,
    chosen,
    folder,
    jobs,
    limit,
    model_name,
    model_of,
    peers,
    resources,
)
from usp.tools.bench.launch import launch, told_to_end, under_torchrun
from usp.tools.bench.peers import PEERS
from usp.tools.bench.plots import plot
from usp.tools.bench.shape import shape
from usp.tools.bench.table import table
from usp.tools.config_bench import Bench, check, mode
from usp.tools.flops import peak_flops
from usp.tools.rates import Rates, default_path

INTERRUPTED = 130  # the exit code of what Ctrl-C ended


def bench(cfg: Bench, words: Sequence[str]) -> None:
    """Carry out one call; `words` are its arguments. Raises ValueError for what does not go together.

    Ctrl-C and SIGTERM end what was started, and what has been measured by then is shown and kept.
    """
    check(cfg)
    if "--plot" in words and not cfg.plot:
        raise ValueError("plot must name JSON files that usp bench has written, got none. Give --plot FILE.")
    if cfg.plot:
        return show(cfg.what, [run for file in cfg.plot for run in report.load(file)], cfg)
    where = resources(cfg)
    todo = jobs(cfg, where)
    if cfg.dry_run:
        return print("\n".join(commands(cfg, where, words)))
    first = not under_torchrun() or os.environ["RANK"] == "0"
    file = folder(cfg) / f"{cfg.what}.json"
    started = datetime.now(UTC).isoformat(timespec="microseconds")
    run = report.Run(cfg.what, shlex.join(["usp", "bench", *words]), started, {}, not_run(cfg, where))
    if first and mode(cfg) != "calibrate":
        report.save(file, run)
    interrupted = False
    for i, job in enumerate(todo):
        if first:
            print(f"[{i + 1}/{len(todo)}] {headline(job)}", flush=True)
        with told_to_end():
            outcome = launch(job)
        machine = run.machine or outcome.machine
        rows = report.with_shares([*run.rows, *outcome.rows], str(machine.get("device", "")))
        run = run._replace(machine=machine, rows=rows)
        if first and outcome.failure:
            print(f"  ended early: {outcome.failure}", flush=True)
        if first and mode(cfg) != "calibrate":
            report.save(file, run)
        if interrupted := outcome.interrupted:
            break
    if mode(cfg) == "calibrate" and first:
        calibrated(cfg, run.rows)
    elif first:
        show(cfg.what, report.load(file) if cfg.what == "scaling" else [run], cfg)
    if interrupted:
        raise SystemExit(INTERRUPTED)
    if first and run.rows and all("error" in row for row in run.rows):
        raise SystemExit(1)


def headline(job: Job) -> str:
    title = PEERS[job.contender].title if job.contender in PEERS else "usp"
    where = "GPUs" if job.device == "cuda" else "processes on the CPU"
    return f"{title}: {job.what}, {job.model} with {job.layers} layers, {where}: {job.processes}"


def not_run(cfg: Bench, where: Resources) -> list[Row]:
    """Rows for peers that are not here, and for parts that would take too long."""
    facts: Row = {"what": cfg.what, "model": model_name(cfg, where), "device": where.device}
    facts["layers"] = model_of(cfg, where).num_layers
    rows = [
        {**facts, "contender": name, "world": where.processes, "error": obstacle}
        for name, obstacle in peers(cfg, where).items()
        if obstacle
    ]
    for part in chosen(cfg, where) if cfg.what == "scaling" else ():
        if part.seconds > limit(cfg):
            reason = f"not run: about {part.seconds:.0f} s, more than --limit {limit(cfg):.0f}"
            more = {"contender": "usp", "world": part.processes, "seq_len": part.seq_len, "error": reason}
            more["layers"] = part.layers
            rows += [{**facts, **more, "label": s.label, "variant": s.variant} for s in part.settings]
    return rows


def commands(cfg: Bench, where: Resources, words: Sequence[str]) -> list[str]:
    """One for each part of the scaling, with about what it takes."""
    own = [word for word in words if word != "--dry-run"]
    if cfg.gpus is None and where.device == "cuda":
        own += ["--gpus", str(where.processes)]
    found = []
    for i, part in enumerate(all_parts(cfg, where)):
        names = ", ".join(setting.label for setting in part.settings)
        about = f"{part.seq_len} tokens, {names}: about {part.seconds / 60:.0f} minutes"
        if part.seconds > limit(cfg):
            about += "; not run without a larger --limit"
        found.append(f"{shlex.join(['usp', 'bench', *own, '--part', str(i)])}  # {about}")
    return found


def calibrated(cfg: Bench, rows: Sequence[Row]) -> None:
    found = next((row["rates"] for row in rows if "rates" in row), None)
    if found is None:
        raise ValueError(f"rates could not be measured: {rows[-1]['error'] if rows else 'no rows'}")
    rates, path = Rates(**found), cfg.out or default_path()
    rates.write(path)
    print(f"{rates.device}, {rates.processes} processes, attention by {rates.kernel}")
    for name in ("matmul", "attention_forward", "attention_backward"):
        print(f"  {name:<20} {getattr(rates, name) / 1e12:9.3f} TFLOP/s")
    for name in ("memory", "to_host", "from_host", "all_to_all", "all_gather", "reduce_scatter"):
        value = getattr(rates, name)
        print(f"  {name:<20} {'not measured' if value is None else f'{value / 1e9:9.3f} GB/s'}")
    print(f"written to {path}; `usp plan` reads {default_path()}")


def show(what: str, runs: Sequence[report.Run], cfg: Bench) -> None:
    """Table, what follows from it, and the plot."""
    given, runs = runs, [run for run in runs if run.what == what]
    rows = report.joined(runs)
    if not rows:
        held = ", ".join(sorted({run.what for run in given})) or "nothing"
        raise ValueError(
            f"plot={[str(p) for p in cfg.plot]} must hold rows of {what}, got {held}. Change --what."
        )
    device, gpu_memory = describe(runs)
    print(table(what, rows))
    if what == "memory":
        found = memory.slopes(rows, gpu_memory)
        print("growth between the two longest lengths, and the longest row that it leaves room for:")
        print("\n".join(memory.slope_lines(found)) or "  not known: fewer than 2 lengths, or no GPU")
    if what == "scaling":
        print("\n".join(scaling_lines(rows, runs, cfg, gpu_memory)))
    path = folder(cfg) / f"{what}.png"
    drawn = plot(what, rows, path)
    print(f"{device}. JSON: {folder(cfg) / f'{what}.json'}" if not cfg.plot else device)
    print(f"plot: {path}" if drawn else "no plot: matplotlib is not installed; --plot draws the JSON later")


def describe(runs: Sequence[report.Run]) -> tuple[str, int | None]:
    """The device in words, and its memory in bytes."""
    machine = next((run.machine for run in runs if run.machine), None)
    if machine is None:
        return "nothing was measured", None
    name, versions = str(machine["device"]), machine.get("versions", {})
    packages = (package for package in ("torch", "flash-attn-4", "deepspeed") if package in versions)
    shown = [f"{package} {versions[package]}" for package in packages]
    peak = peak_flops(name)
    words = f"peak {peak / 1e12:.0f} TFLOP/s" if peak else "its peak is not known"
    if name == "CPU":
        words = "these numbers say nothing about a GPU"
    return f"measured on {name}, {', '.join(shown)}; {words}", machine.get("gpu_memory")


def scaling_lines(
    rows: Sequence[Row], runs: Sequence[report.Run], cfg: Bench, gpu_memory: int | None
) -> list[str]:
    per_gpu = min(row["seq_len"] // row["world"] for row in rows if "seq_len" in row)
    found = list(scaling.lines(rows, per_gpu))
    host = next((run.machine.get("host_memory") for run in runs if run.machine), None)
    if gpu_memory and host:
        for layers, n in product(*(sorted({row[name] for row in rows}) for name in ("layers", "world"))):
            model = shape(rows[0]["model"], layers)
            tokens, how = scaling.foretold_longest(model, n, gpu_memory, host)
            where = f"longest row of {layers} layers on {n} GPU{'s' * (n > 1)}, as the plan foretells"
            found.append(f"  {where}: {tokens} tokens with {how}")
    return found
