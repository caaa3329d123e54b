"""Stands in for `usp.tools.bench.worker`: made-up rows, and contenders that end badly. No torch."""

import json
import sys
import time
from pathlib import Path
from typing import Any

SECONDS = {"usp": 0.5, "deepspeed": 0.8, "transformers": 1.0}
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"


def rows_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    labels = [(s["label"], s["variant"]) for s in job["settings"]] or [(v, v) for v in job["variants"]]
    facts = {name: job[name] for name in ("what", "contender", "model", "layers", "device")}
    facts |= {"world": job["processes"], "kernel": "made up", "peak": 3 * 2**30, "base": 2**30}
    facts |= {"seconds": SECONDS[job["contender"]], "remat": "attention", "group": 1, "offload": "none"}
    facts |= {"mlp_tile": None, "head_chunks": 1, "host_bytes": 0}
    return [
        {**facts, "label": label, "variant": variant, "seq_len": n, "tokens_per_s_gpu": n / facts["seconds"],
         "tflops_gpu": 100.0}
        for label, variant in labels
        for n in job["seq_lens"]
    ]  # fmt: skip


def main() -> None:
    job, path = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    lines: list[dict[str, Any]] = [{"machine": {"device": "NVIDIA H200", "gpu_memory": 150 * 10**9}}]
    lines += rows_of(job)
    if job["contender"] == "deepspeed":
        lines = lines[:2]
    if job["contender"] == "transformers":
        lines = lines[:1]
    with path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.write('{"what": "st')  # cut off
    if job["contender"] == "deepspeed":
        raise SystemExit(OUT_OF_MEMORY)
    if job["contender"] == "transformers":
        time.sleep(60)


if __name__ == "__main__":
    main()
