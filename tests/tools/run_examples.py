"""Runs the examples as their own docstrings say, on forked ranks that share the slow imports."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shlex
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.forked import forked

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "tools" / "examples"
COMMAND = re.compile(
    r"^    torchrun --nproc-per-node (\d+) -m usp\.tools\.examples\.(\w+)(.*)$", re.MULTILINE
)
ONCE = {"deepspeed_engine"}  # DeepSpeed keeps its groups for as long as a process lives


def command_of(name: str) -> list[str]:
    """Number of ranks and arguments of the command in the example's docstring."""
    found = COMMAND.findall((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
    assert len(found) == 1, name
    assert found[0][1] == name
    return [found[0][0], *shlex.split(found[0][2])]


def run(name: str, more: Sequence[str]) -> Any:
    """What the example's `main` returns, called as `python -m` calls it."""
    from accelerate.state import AcceleratorState

    _, *words = command_of(name)
    sys.argv = [name, *words, *more]
    found = runpy.run_module(f"usp.tools.examples.{name}", run_name="__main__")
    AcceleratorState._reset_state(True)
    return found["losses"] if "losses" in found else found["apart"]


def on_rank(rank: int, ports: Sequence[int], folder: Path, chosen: dict[str, list[str]]) -> None:
    """All examples on two ranks; then half of them on this process alone. Results as JSON."""
    torch.set_num_threads(1)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    results: dict[str, dict[str, Any]] = {"two": {}, "one": {}}
    with (folder / f"{rank}.log").open("w", buffering=1) as log, _to(log):
        try:
            for (name, more), port in zip(chosen.items(), ports[2:], strict=True):
                _launched(rank, 2, port)  # a port each: the last one's store may still be there
                os.chdir(folder / "two")
                results["two"][name] = run(name, more)
            log.write("usp one process\n")
            _launched(0, 1, ports[rank])
            for name in [name for name in chosen if name not in ONCE][rank::2]:
                os.chdir(folder / "one")
                results["one"][name] = run(name, chosen[name])
            (folder / f"{rank}.json").write_text(json.dumps(results))
        except BaseException:
            log.write(traceback.format_exc())
            os._exit(1)  # a peer may wait for this one


@contextlib.contextmanager
def _to(log: Any) -> Any:
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        yield


def _launched(rank: int, world: int, port: int) -> None:
    """What torchrun sets."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def launch(folder: Path, chosen: dict[str, list[str]], timeout: float = 400.0) -> list[dict[str, Any]]:
    """Results of each rank, and what it printed. AssertionError with the logs when one fails."""
    context = forked()
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2 + len(chosen))]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    children = [
        context.Process(target=on_rank, args=(rank, ports, folder, chosen), daemon=True) for rank in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout)
    for child in children:
        child.kill()
    logs = [(folder / f"{rank}.log").read_text() for rank in range(2)]
    made = [folder / f"{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in made), "\n".join(log[-3000:] for log in logs)
    return [{**json.loads(f.read_text()), "log": log} for f, log in zip(made, logs, strict=True)]
