"""One process of a launch, started by `usp.tools.bench.launch`: python -m usp.tools.bench.worker JOB ROWS."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from usp.tools.bench.job import Job
from usp.tools.bench.place import Place, join

OURS: Mapping[str, str] = MappingProxyType(
    {"step": "step", "memory": "step", "scaling": "step"}
    | {name: name for name in ("kernel", "exchange", "scan", "loss", "passes", "calibrate")}
)
PEERS: Mapping[str, str] = MappingProxyType(
    {"deepspeed": "peers.deepspeed", "torch-cp": "peers.torch_cp", "transformers": "peers.transformers"}
)


def runner(job: Job) -> Callable[[Job, Place], None]:
    """The function that carries out a job; what a peer needs is imported only with it."""
    module = PEERS[job.contender] if job.what == "step" and job.contender != "usp" else OURS[job.what]
    found: Callable[[Job, Place], None] = importlib.import_module(f"usp.tools.bench.{module}").run
    return found


def main() -> None:
    job, rows = Job.read(Path(sys.argv[1])), Path(sys.argv[2])
    try:
        place = join(rows, job.device, seconds=job.limit)
        place.emit({"machine": place.machine()})
        runner(job)(job, place)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as e:
        # for the one who launched this; the traceback goes to the log
        rank = os.environ.get("RANK", "0")
        said = str(e).strip().split("\n")[0][:300]
        rows.with_suffix(f".{rank}.error").write_text(f"{type(e).__name__}: {said}", encoding="utf-8")
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the others may wait in a collective: the launcher ends them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries of the peers have threads that do not end


if __name__ == "__main__":
    main()
