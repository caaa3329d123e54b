"""Starting the processes of one job, with a limit; what they could not do becomes rows that say why."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from usp.mesh.agree import gather_objects
from usp.tools.bench.job import Job, Row

GRACE = 40.0  # seconds in which a launcher ends its workers
UNSET = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WORKER = "usp.tools.bench.worker"


class Outcome(NamedTuple):
    """Rows that came, the machine as the processes saw it, why the launch ended early ("": it did not)."""

    rows: list[Row]
    machine: Row
    failure: str
    interrupted: bool = False
    """Whether this process was told to end; those of the launch have ended."""


def launch(job: Job) -> Outcome:
    """Run a job in processes of its own; the rows that it should have given and did not hold an `error`.

    Rows are in `job.logs` while they come, so that they outlive this process; what a launch said that ended
    early stays there.
    """
    rank = os.environ.get("RANK", "")
    with tempfile.TemporaryDirectory(prefix="usp-bench-") as own:
        kept = Path(job.logs) if job.logs and rank in ("", "0") else Path(own)
        kept.mkdir(parents=True, exist_ok=True)
        name = f"{job.what}-{job.contender}"
        file, log, rows = Path(own) / "job.json", Path(own) / "log", kept / f"{name}.jsonl"
        discard(rows)
        job.write(file)
        interrupted = False
        try:
            failure = processes(job, [sys.executable], ["-m", WORKER, str(file), str(rows)], log)
        except KeyboardInterrupt:
            failure, interrupted = "interrupted", True
        if failure and job.logs and log.exists():
            shutil.copy(log, Path(job.logs) / f"{name}{rank and '.' + rank}.log")
        outcome = collect(job, rows, failure)._replace(interrupted=interrupted)
        discard(rows)
        return outcome


def processes(job: Job, python: list[str], worker: list[str], log: Path) -> str:
    """Run the job's processes to their end; why they failed, or ""."""
    own = environment(threads(job))
    if under_torchrun():
        return beside([*python, *worker], own, job.limit, log)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.processes)]
    return alone([*python, *torchrun, *worker], own, job.limit, log)


@contextmanager
def told_to_end() -> Iterator[None]:
    """SIGTERM interrupts as Ctrl-C does, so that no launch is left behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def discard(rows: Path) -> None:
    """The rows of a launch, and what its ranks ended with."""
    for file in (rows, *errors(rows)):
        file.unlink(missing_ok=True)


def errors(rows: Path) -> list[Path]:
    """What ranks ended with: see `usp.tools.bench.worker`."""
    return sorted(rows.parent.glob(f"{rows.stem}.*.error"))


def under_torchrun() -> bool:
    return "RANK" in os.environ


def threads(job: Job) -> int:
    """For each process: beside a GPU one, on a CPU its share of the cores, so that all are used."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", job.processes))
    return 1 if job.device == "cuda" else max(1, (os.cpu_count() or 1) // here)


def environment(num_threads: int) -> dict[str, str]:
    """That of this process, with the settings which every contender is given."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    given = {"OMP_NUM_THREADS": str(num_threads), "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {**given, **kept}


def alone(command: Sequence[str], env: Mapping[str, str], limit: float, log: Path) -> str:
    """Run a command in a session of its own; why it failed, or "". All of it ends with the limit."""
    child = start(command, env, log)
    try:
        code = child.wait(limit)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit:.0f} s"
    finally:
        end(child)
    return "" if code == 0 else f"{last_error(log)} (exit code {code})"


def start(command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def beside(command: Sequence[str], env: Mapping[str, str], limit: float, log: Path) -> str:
    """One child for this rank of an existing torchrun, which meets those of the other ranks at a new port."""
    rank = int(os.environ["RANK"])
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with socket.socket() as free:
        free.bind(("", 0))
        port = gather_objects(free.getsockname()[1], dist.group.WORLD)[0]
    extra = {name: os.environ[name] for name in UNSET if name != "MASTER_PORT"}
    extra |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    began, child = time.monotonic(), start(command, {**env, **extra}, log)
    try:
        while True:  # all ranks see the same states, and so leave together
            states = gather_objects((child.poll(), time.monotonic() - began > limit), dist.group.WORLD)
            failed = [i for i, (code, _) in enumerate(states) if code not in (None, 0)]
            late = states[0][1]
            if failed or late or all(code == 0 for code, _ in states):
                break
            time.sleep(0.5)
    finally:
        end(child)
    own = last_error(log) if rank in failed else ""
    said = gather_objects(own, dist.group.WORLD)
    if failed:
        return f"rank {failed[0]}: {said[failed[0]]} (exit code {states[failed[0]][0]})"
    return f"took longer than {limit:.0f} s" if late else ""


def end(child: subprocess.Popen[bytes]) -> None:
    """A launcher is asked to end, and ends its workers, which have sessions of their own; then all of it."""
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def last_error(log: Path) -> str:
    """The last line of a log that names an error, or its last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = [line for line in lines if line.strip()]
    named = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (named or lines or ["no output"])[-1].strip()[:300]


def collect(job: Job, path: Path, failure: str) -> Outcome:
    """What the processes wrote, and a row with the reason for each that is missing."""
    machine: Row = {}
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found = json.loads(line)
        except ValueError:  # cut off when the process ended
            continue
        machine, rows = (found["machine"], rows) if "machine" in found else (machine, [*rows, found])
    if failure and not failure.startswith("took longer"):
        own = errors(path)
        failure = own[0].read_text(encoding="utf-8") if own else failure
    earlier = next((row["error"] for row in reversed(rows) if "error" in row), "")
    reason = failure or f"the process ended before it: {earlier}"
    rows += [{**job.facts(), **row, "error": reason} for row in missing(job.expected(), rows)]
    if failure and not any(row.get("error") == failure for row in rows):
        rows.append({**job.facts(), "error": failure})
    return Outcome(rows, machine, failure)


def missing(expected: Iterable[Row], rows: Sequence[Row]) -> list[Row]:
    """Those expected that no row answers, by label (where it is known before) and length."""
    there = {(row.get("label"), row.get("seq_len")) for row in rows}
    there |= {(None, seq_len) for _, seq_len in there}
    return [row for row in expected if (row.get("label"), row.get("seq_len")) not in there]
