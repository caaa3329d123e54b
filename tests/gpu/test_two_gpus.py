"""Two GPUs over NCCL: moves are exact, and training follows the curve of one GPU."""

import itertools
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode

from tests.gpu.smol import launch, smol_shape, write_text
from tests.ranks import run_ranks
from usp import heads_to_seq, seq_to_heads
from usp.mesh import TABLES, P, build_mesh, local_slices, redistribute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def move(
    x: torch.Tensor, src: P, dst: P, mesh: DeviceMesh, shape: tuple[int, ...] | None = None
) -> torch.Tensor:
    return redistribute(x, src, dst, mesh, shape=shape)


def cubes(x: torch.Tensor, src: P, dst: P, mesh: DeviceMesh) -> torch.Tensor:
    return move(x, src, dst, mesh).pow(3).sum()


def moves(rank: int, world_size: int) -> dict[str, int]:
    mesh = build_mesh(ulysses=world_size)
    uneven, even = (9, 7, 5), (8, 6, 4)
    full = torch.arange(9 * 7 * 5.0, device="cuda").view(uneven)
    specs = [
        P("ulysses", None, None),
        P(None, "ulysses", None),
        P(None, None, "ulysses"),
        P(None, None, None),
    ]
    for src, dst in itertools.product(specs, specs):
        x = full[local_slices(src, uneven, mesh)]
        assert torch.equal(move(x, src, dst, mesh, uneven), full[local_slices(dst, uneven, mesh)])
        x = torch.randn(even, device="cuda")[local_slices(src, even, mesh)]
        grad = torch.func.grad(partial(cubes, src=src, dst=dst, mesh=mesh))
        torch.compiler.reset()  # else the second shape is compiled dynamically, which torch 2.11 cannot here
        compiled = torch.compile(grad, fullgraph=True, dynamic=False)(x)
        torch.testing.assert_close(compiled, grad(x))
    return count_heads(mesh, rank)


def count_heads(mesh: DeviceMesh, rank: int) -> dict[str, int]:
    """9 query and 3 kv heads, there and back, exact; collectives of both directions."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 10, n, 8, device="cuda") for n in (9, 3, 3))
    rows = slice(5 * rank, 5 * rank + 5)
    table = TABLES["ulysses"]
    local = [t[:, rows].clone().requires_grad_() for t in (q, k, v)]
    with CommDebugMode() as comm:
        qh, _, _ = seq_to_heads(*local, mesh=mesh, table=table, seq_len=10)
        back = heads_to_seq(qh, num_heads=9, mesh=mesh, table=table, seq_len=10)
    assert torch.equal(back, local[0])
    forward = comm.get_total_counts()
    with CommDebugMode() as comm:
        back.backward(torch.ones_like(back))
    assert local[0].grad is not None
    assert torch.equal(local[0].grad, torch.ones_like(local[0]))
    return {"forward": forward, "backward": comm.get_total_counts()}


def test_moves_are_exact_and_counted() -> None:
    for counts in run_ranks(moves, 2, backend="nccl", timeout=300.0):
        assert counts == {"forward": 2, "backward": 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_gpus_follow_one(dtype: str, tmp_path: Path) -> None:
    """SmolLM2's shape, random weights: the same losses and gradient norms at every step."""
    model, data = smol_shape(tmp_path / "model"), write_text(tmp_path / "data")
    curves = []
    for ranks in (1, 2):
        out = tmp_path / f"{dtype}-{ranks}"
        launch(ranks, model, data, out, seq_len=4096, steps=10, dtype=dtype)
        curves.append([json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()])
    # float32: sums in another order. bfloat16: one rounding is 4e-3, and each step rounds the weights again.
    tolerance = {"float32": 1e-4, "bfloat16": 1e-2}[dtype]
    for one, two in zip(*curves, strict=True):
        losses = f"{one['loss']:.6f} {two['loss']:.6f}"
        print(f"{dtype} step {one['step']:2d} loss {losses}", file=sys.stderr)
        assert abs(one["loss"] - two["loss"]) < tolerance * one["loss"]
    print(
        f"tokens/s {curves[0][-1]['tokens_per_s']:.0f} {curves[1][-1]['tokens_per_s']:.0f}", file=sys.stderr
    )
