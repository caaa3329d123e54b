"""Moving q, k, v to the heads and the result back, against a raw all-to-all of the same bytes: torchrun."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from usp import heads_to_seq
from usp.heads import wire, wired_to_heads
from usp.mesh import TABLES, build_mesh

HEADS, SIZE = (32, 8, 8), 128


def milliseconds(fn: Callable[[], Any], repeats: int = 20) -> float:
    """Median, on the device."""
    for _ in range(3):
        fn()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        dist.barrier()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        fn()
        stop.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(stop)))
    return sorted(times)[repeats // 2]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--seq-len", type=int, nargs="+", default=[8192, 32768, 131072, 524288])
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--out", type=Path, default=None)
    args = p.parse_args()
    local, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    dist.init_process_group("nccl", device_id=device)
    mesh, table = build_mesh(ulysses=world), TABLES["ulysses"]
    group = mesh.get_group("ulysses")
    for seq_len in args.seq_len:
        part, where = seq_len // world, {"mesh": mesh, "table": table, "seq_len": seq_len}
        own = [(n // world, SIZE) for n in HEADS]

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        q, k, v = (randn(args.batch, part, n, SIZE) for n in HEADS)
        wired = wire([q, k, v], world).requires_grad_()
        o = randn(args.batch, seq_len, HEADS[0] // world, SIZE).requires_grad_()
        flat, flat_o = torch.empty_like(wired).view(-1), torch.empty_like(o).view(-1)
        there = wired_to_heads(wired, own, **where)
        back = heads_to_seq(o, num_heads=HEADS[0], **where)
        ups, up = [torch.randn_like(t).contiguous() for t in there], torch.randn_like(back)

        def raw(x: torch.Tensor) -> Callable[[], Any]:
            y = torch.empty_like(x)
            return lambda: dist.all_to_all_single(y, x, group=group)

        row = {
            "seq_len": seq_len,
            "batch": args.batch,
            "world": world,
            "raw_qkv": milliseconds(raw(flat)),
            "qkv": milliseconds(lambda: wired_to_heads(wired.detach(), own, **where)),  # noqa: B023
            "qkv_packed": milliseconds(lambda: wired_to_heads(wire([q, k, v], world), own, **where)),  # noqa: B023
            "qkv_backward": milliseconds(lambda: torch.autograd.grad(there, wired, ups, retain_graph=True)),  # noqa: B023
            "raw_o": milliseconds(raw(flat_o)),
            "o": milliseconds(lambda: heads_to_seq(o.detach(), num_heads=HEADS[0], **where)),  # noqa: B023
            "o_backward": milliseconds(lambda: torch.autograd.grad(back, o, up, retain_graph=True)),  # noqa: B023
        }
        if dist.get_rank() == 0:
            print(" ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
            if args.out:
                with args.out.open("a") as f:
                    f.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
