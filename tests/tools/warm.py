"""`python -m MODULE` and `torchrun -m MODULE` without their imports.

torch's own elastic agent and its workers run in forked processes that have everything imported.
"""

import ctypes
import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.forked import forked


class Job(NamedTuple):
    words: Sequence[str]
    """Module and its arguments."""
    ranks: int
    """0: no launcher."""
    restarts: int
    logs: Path | None
    cwd: Path
    env: dict[str, str]
    said: Path
    """Folder of what is written to stdout and stderr."""


def start_warm(job: Job) -> Any:
    """The launcher's process, under way."""
    process = forked().Process(target=_start, args=(job,))
    process.start()
    return process


def said_by(job: Job) -> tuple[str, str]:
    """What was written to stdout and stderr."""
    out, err = ((job.said / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    return out, err


def run_warm(job: Job, *, timeout: float) -> "subprocess.CompletedProcess[str]":
    """As `subprocess.run` of the command; a process that outlives `timeout` seconds is an error."""
    process = start_warm(job)
    process.join(timeout)
    if process.is_alive():
        process.terminate()  # the agent ends its workers
        process.join(5)
        process.kill()
        raise subprocess.TimeoutExpired(list(job.words), timeout, *said_by(job))
    return subprocess.CompletedProcess(list(job.words), process.exitcode or 0, *said_by(job))


def _start(job: Job) -> None:
    for fd, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(job.said / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, fd)
        os.close(file)
    os.environ.clear()
    os.environ.update(job.env)
    os.chdir(job.cwd)
    sys.path.insert(0, str(job.cwd))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(1)
    if not job.ranks:
        sys.exit(_run(job.words))
    # torch tells of a worker's exit code with a traceback of its own where it forks
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=job.ranks, run_id=job.said.name, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=job.restarts, start_method="fork",
        logs_specs=DefaultLogsSpecs(
            log_dir=None if job.logs is None else str(job.logs), redirects=Std.ALL if job.logs else Std.NONE
        ),
    )  # fmt: skip
    try:
        elastic_launch(config, _work)(job.words)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def _work(words: Sequence[str]) -> None:
    """In a child of its own: our tools leave by `os._exit`, and torch waits for a worker's result."""
    parent = os.getpid()
    child = os.fork()
    if child:
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        if code:
            sys.exit(code)
        return
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
        assert os.getppid() == parent
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = _run(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(words: Sequence[str]) -> int:
    """As the interpreter does it: the exit code."""
    sys.argv = list(words)
    warnings.filterwarnings("ignore", message=".*found in sys.modules after import of package")
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
