"""The compiled pass of AdamW on a GPU: torch's numbers, no waiting, no memory, and the memory's speed."""

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from usp import adamw_init, adamw_update
from usp.adamw import LARGE, ROWS, WIDTH, Leaf, update_large

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]
FIXED: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
SHAPES = {"a": (1 << 12, 1 << 11), "b": (LARGE // 64 + 3, 64), "small": (33, 7), "vector": (4096,)}


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def tree(seed: int) -> dict[str, Tensor]:
    return {name: normal(*shape, seed=seed + i) for i, (name, shape) in enumerate(SHAPES.items())}


def after_steps(dtype: torch.dtype, compiled: bool | None) -> list[dict[str, Tensor]]:
    """Parameters and both moments. After the first step the host does not wait, and takes no memory."""
    params = {name: p.to(dtype) for name, p in tree(1).items()}
    state, graphs = adamw_init(params), 0
    for step, rate in enumerate((0.01, 0.02, 0.005, 0.03)):
        grads = {name: g.to(dtype) for name, g in tree(10 * step + 10).items()}
        scale = torch.full((), 0.3, device="cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if step:
            torch.cuda.set_sync_debug_mode("error")
        try:
            adamw_update(params, grads, state, lr=rate, grad_scale=scale, compiled=compiled, **FIXED)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if step:
            assert torch.cuda.max_memory_allocated() - before < 1 << 20
            assert counters["stats"]["unique_graphs"] == graphs
        graphs = counters["stats"]["unique_graphs"]
    return [params, state.exp_avg, state.exp_avg_sq]


def test_steps() -> None:
    exact = after_steps(torch.float64, False)
    ours, theirs = (after_steps(torch.float32, compiled) for compiled in (None, False))
    for got, other, want in zip(ours, theirs, exact, strict=True):
        for name, whole in want.items():
            error, torchs = ((t[name].double() - whole).abs().max() for t in (got, other))
            assert error <= 4 * torch.finfo(torch.float32).eps * whole.abs().max(), name  # four roundings
            assert torch.equal(got[name], other[name]) or error <= 2 * torchs, name


@pytest.mark.skipif(
    torch.cuda.device_count() > 0 and torch.cuda.mem_get_info()[1] < 24 << 30, reason="needs 24 GiB"
)
def test_more_elements_than_an_index_has() -> None:
    """2**31 and some: every entry of a part that repeats gets what one such part gets."""
    part = WIDTH * 1001
    count = 2 * ROWS * WIDTH // part + 2
    short = [normal(part, seed=i, dtype=torch.bfloat16) for i in range(2)]
    results = []
    for times in (1, count):
        p, grad = (t.repeat(times) for t in short)
        leaf = Leaf(p, grad, torch.zeros_like(p), torch.zeros_like(p), torch.zeros((), device="cuda"))
        for _ in range(2):
            update_large([leaf], lr=0.1, grad_scale=None, **FIXED)
        results.append(leaf)
    one, many = results
    assert many.p.numel() > 2**31
    for place in (0, 2, 3):
        for whole in many[place].view(count, part).split(1 << 13):
            assert (whole == one[place]).all()


def milliseconds(work: Callable[[], Any]) -> float:
    found = []
    for _ in range(7):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(40_000_000)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop))
    return statistics.median(found)


def test_as_fast_as_the_memory() -> None:
    """28 bytes an element, at 1.3 times what a copy takes for as many."""
    params = {str(i): torch.ones(1 << 12, 1 << 14, device="cuda") for i in range(4)}
    grads, state = {name: torch.ones_like(p) for name, p in params.items()}, adamw_init(params)
    scale = torch.ones((), device="cuda")
    adamw_update(params, grads, state, lr=0.1, grad_scale=scale)
    took = milliseconds(lambda: adamw_update(params, grads, state, lr=0.1, grad_scale=scale))
    source, target = (
        torch.empty(sum(p.nbytes for p in params.values()), dtype=torch.uint8, device="cuda") for _ in "ab"
    )
    floor = milliseconds(lambda: target.copy_(source)) * 28 / 8
    assert took <= 1.3 * floor
