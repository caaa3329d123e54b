"""Time and memory of whole training steps on random weights: `torchrun -m usp.tools.bench.step --help`."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from usp import (
    Batch,
    adamw_init,
    adamw_update,
    clip_by_global_norm,
    models,
    reduce_grads,
    shard_batch,
    value_and_grad,
)
from usp.arena import Arena
from usp.mesh import TABLES, build_mesh, local_shape
from usp.models import LlamaConfig

LLAMA_3_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_heads": 32,
    "num_kv_heads": 8,
    "rope_theta": 500000.0,
}
SHOWN = ("table", "ring", "remat", "offload", "group", "kernel", "head_chunks", "mlp_tile", "compile")
OPTIONS = ("remat", "kernel", "head_chunks", "mlp_tile", "group", "offload", "compile")


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
    p.add_argument("--remat", default="attention")
    p.add_argument("--group", type=int, default=1)
    p.add_argument("--offload", default="none")
    p.add_argument("--kernel", default="auto")
    p.add_argument("--head-chunks", type=int, default=1)
    p.add_argument("--mlp-tile", type=int, default=None)
    p.add_argument("--compile", action="store_true")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--trace", type=Path, default=None, help="write a Chrome trace of one step here")
    p.add_argument("--out", type=Path, default=None, help="append one line of JSON per length here")
    return p.parse_args()


def make_step(
    args: argparse.Namespace, device: torch.device, mesh: Any
) -> tuple[Any, LlamaConfig, Arena | None]:
    """A step on one shard; parameters and moments are float32 shards, computation is bfloat16."""
    table = TABLES[args.table]
    cfg = LlamaConfig(num_layers=args.layers, **LLAMA_3_8B)
    specs = models.param_specs(cfg, table)

    def make(_: str, leaf: Any, spec: Any) -> torch.Tensor:
        shape = local_shape(spec, leaf.shape, mesh)
        return (torch.randn if leaf.init == "normal" else torch.ones)(shape, device=device) * 0.02

    params = models.map_params(make, models.abstract(cfg), specs)
    state = adamw_init(params)
    arena = Arena() if args.offload == "host" else None
    options: dict[str, Any] = {name: getattr(args, name) for name in OPTIONS}
    options |= {"dtype": torch.bfloat16, "arena": arena}
    loss_and_grads = value_and_grad(
        lambda p, shard: models.loss(p, shard, cfg, table=table, mesh=mesh, **options)
    )

    def step(shard: Any) -> torch.Tensor:
        loss, grads = loss_and_grads(params, shard)
        grads = reduce_grads(grads, specs, mesh)
        grads, _ = clip_by_global_norm(grads, specs, mesh, 1.0)
        adamw_update(params, grads, state, lr=1e-5, weight_decay=0.0)
        result: torch.Tensor = loss.detach()
        return result

    return step, cfg, arena


def measure(step: Any, shard: Any, steps: int) -> dict[str, Any]:
    began = time.perf_counter()
    step(shard)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    times, host, loss = [], [], torch.zeros(())
    for _ in range(steps):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = step(shard)
        host.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated()
    return {"first": first, "times": times, "host": min(host), "loss": float(loss), "peak": peak}


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
    step, cfg, arena = make_step(args, device, mesh)
    base = torch.cuda.memory_allocated()
    for seq_len in args.seq_len:
        tokens = torch.randint(cfg.vocab_size, (1, seq_len), generator=torch.Generator().manual_seed(seq_len))
        shard = shard_batch(Batch(tokens), table=TABLES[args.table], mesh=mesh, device=device)
        row: dict[str, Any] = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        row |= {"seq_len": seq_len, "world": world, "base": base}
        try:
            row |= measure(step, shard, args.steps)
            seconds = sorted(row["times"])[len(row["times"]) // 2]
            row |= {
                "seconds": seconds,
                "tokens_per_s_gpu": seq_len / seconds / world,
                "tflops_gpu": flops_per_token(cfg, seq_len) * seq_len / seconds / world / 1e12,
                "kib_per_local_token": (row["peak"] - base) / 1024 / (seq_len / world),
                "host_gib": 0.0 if arena is None else arena.nbytes / 2**30,
            }
        except torch.cuda.OutOfMemoryError as e:
            row["error"] = str(e)[:120]
        if local == 0:
            print(seq_len, *(row[k] for k in SHOWN), report(row), flush=True)
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
