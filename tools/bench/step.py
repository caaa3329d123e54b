"""Time and memory of whole training steps on random weights: `torchrun -m usp.tools.bench.step --help`."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from usp import (
    Batch,
    adamw_init,
    adamw_update,
    global_norm,
    models,
    reduce_grads,
    shard_batch,
    value_and_grad,
)
from usp.arena import Arena
from usp.mesh import TABLES, build_mesh, local_shape
from usp.models import LlamaConfig
from usp.optim import clip_scale

LLAMA_3_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_heads": 32,
    "num_kv_heads": 8,
    "rope_theta": 500000.0,
}
DEFAULTS: dict[str, Any] = {
    "remat": "attention",
    "group": 1,
    "offload": "none",
    "kernel": "auto",
    "head_chunks": 1,
    "mlp_tile": None,
    "compile": True,
    "stored": 0,  # so many of the last layers keep everything
}


def flops_per_token(cfg: LlamaConfig, seq_len: int) -> float:
    """6 N + 6 L H d S: causal, no recomputation counted, N without the input embedding."""
    d, f, h = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    layer = d * h * (2 * cfg.num_heads + 2 * cfg.num_kv_heads) + 3 * d * f
    weights = cfg.num_layers * layer + cfg.vocab_size * d
    return 6 * weights + 6 * cfg.num_layers * cfg.num_heads * h * seq_len


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--seq-len", type=int, nargs="+", default=[32768])
    p.add_argument("--ring", type=int, default=1)
    p.add_argument("--table", default="usp")
    p.add_argument(
        "--setting", nargs="+", default=[""],
        help=f"options of the model, each setting as name=value,name=value; known: {', '.join(DEFAULTS)}",
    )  # fmt: skip
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--trace", type=Path, default=None, help="write a Chrome trace of one step here")
    p.add_argument("--out", type=Path, default=None, help="append one line of JSON per length here")
    return p.parse_args()


def read_setting(text: str) -> dict[str, Any]:
    setting = dict(DEFAULTS)
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in DEFAULTS:
            raise SystemExit(f"--setting {text!r} must use {', '.join(DEFAULTS)}, got {name!r}.")
        setting[name] = {"None": None, "True": True, "False": False}.get(value, value)
        if value.isdigit():
            setting[name] = int(value)
    return setting


class Bench:
    """One model's parameters and moments, float32 shards; computation is bfloat16."""

    def __init__(self, layers: int, table: str, device: torch.device, mesh: Any) -> None:
        self.table, self.mesh = TABLES[table], mesh
        self.cfg = LlamaConfig(num_layers=layers, **LLAMA_3_8B)
        self.specs = models.param_specs(self.cfg, self.table)

        def make(_: str, leaf: Any, spec: Any) -> torch.Tensor:
            shape = local_shape(spec, leaf.shape, mesh)
            if leaf.init == "normal":
                return torch.randn(shape, device=device) * 0.02
            return torch.ones(shape, device=device)

        self.params = models.map_params(make, models.abstract(self.cfg), self.specs)
        self.state = adamw_init(self.params)
        self.arena = Arena()

    def step_with(self, setting: dict[str, Any]) -> Callable[[Any], torch.Tensor]:
        options = {name: value for name, value in setting.items() if name != "stored"}
        options |= {"dtype": torch.bfloat16, "arena": self.arena if setting["offload"] == "host" else None}
        if setting["stored"]:
            rest = self.cfg.num_layers - setting["stored"]
            options["remat"] = [setting["remat"]] * rest + ["none"] * setting["stored"]
        loss_and_grads = value_and_grad(
            lambda p, shard: models.loss(p, shard, self.cfg, table=self.table, mesh=self.mesh, **options)
        )

        def step(shard: Any) -> torch.Tensor:
            loss, grads = loss_and_grads(self.params, shard)
            grads = reduce_grads(grads, self.specs, self.mesh)
            scale = clip_scale(global_norm(grads, self.specs, self.mesh), 1.0)
            adamw_update(self.params, grads, self.state, lr=1e-5, grad_scale=scale)
            result: torch.Tensor = loss.detach()
            return result

        return step


def measure(step: Any, shard: Any, steps: int) -> dict[str, Any]:
    """Steps one after the other, as in training: the host does not wait between them."""
    began = time.perf_counter()
    loss = step(shard)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        loss = step(shard)
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / steps
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {
        "first": first, "seconds": seconds, "host": host / steps, "loss": float(loss), "peak": peak,
        "reserved": reserved,
    }  # fmt: skip


def report(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"ERROR {row['error']}"
    return (
        f"first {row['first']:.1f} s, step {row['seconds']:.3f} s, host {row['host']:.3f} s, "
        f"{row['tokens_per_s_gpu']:.0f} tokens/s/GPU, {row['tflops_gpu']:.0f} TFLOP/s, "
        f"peak {row['peak'] / 2**30:.1f} GiB of which {row['base'] / 2**30:.1f} parameters and moments, "
        f"{row['kib_per_local_token']:.1f} KiB a token, host {row['host_gib']:.1f} GiB, "
        f"loss {row['loss']:.4f}"
    )


def main() -> None:
    args = parse()
    local, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    dist.init_process_group("nccl", device_id=device)
    mesh = build_mesh(ring=args.ring, ulysses=world // args.ring)
    bench = Bench(args.layers, args.table, device, mesh)
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    for text, seq_len in product(args.setting, args.seq_len):
        setting = read_setting(text)
        tokens = torch.randint(
            bench.cfg.vocab_size, (1, seq_len), generator=torch.Generator().manual_seed(seq_len)
        )
        shard = shard_batch(Batch(tokens), table=bench.table, mesh=mesh, device=device)
        row: dict[str, Any] = {"layers": args.layers, "table": args.table, "ring": args.ring, "world": world}
        row |= setting | {"seq_len": seq_len, "base": base}
        step = bench.step_with(setting)
        try:
            row |= measure(step, shard, args.steps)
            rate = flops_per_token(bench.cfg, seq_len) * seq_len / row["seconds"] / world / 1e12
            row |= {
                "tokens_per_s_gpu": seq_len / row["seconds"] / world,
                "tflops_gpu": rate,
                "kib_per_local_token": (row["peak"] - base) / 1024 / (seq_len / world),
                "host_gib": bench.arena.nbytes / 2**30 if setting["offload"] == "host" else 0.0,
            }
        except torch.cuda.OutOfMemoryError as e:
            row["error"] = str(e)[:120]
        if dist.get_rank() == 0:
            print(f"{seq_len} {args.table} ring {args.ring} [{text}]", report(row), flush=True)
            if args.out:
                with args.out.open("a") as f:
                    f.write(json.dumps(row) + "\n")
        if args.trace and "error" not in row:
            with torch.profiler.profile() as profile:
                step(shard)
                torch.cuda.synchronize()
            if local == 0:
                profile.export_chrome_trace(str(args.trace))
        dist.barrier()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
