"""Two GPUs: attention over a ring, and over heads, with every kernel in bfloat16 against dense float64."""

import pytest
import torch

from tests.ranks import run_ranks
from tests.usp.rings import Case, parity
from usp.kernels import KERNELS, PACKED, SOFTCAP, WINDOW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
EDGES = [0, 3, 130, 256, 257, 512]
CASES = [
    (Case((1, 512, 8, 2, 64, 64)), set()),
    (Case((2, 256, 9, 3, 128, 128), None, False), set()),
    (Case((1, 512, 8, 4, 64, 64), EDGES), {PACKED}),
    (Case((1, 512, 8, 2, 128, 128), None, True, 100, True), {WINDOW}),
    (Case((1, 512, 4, 2, 64, 64), EDGES, True, 70, False, 5.0), {PACKED, WINDOW, SOFTCAP}),
]
# bfloat16 rounds by 2^-9 of a number: the weights, the result and the partial gradients, once each
BF16 = 8 * 2.0**-8


def on_gpu(rank: int, world: int, kernel: str) -> list[tuple[str, str, float]]:
    cases = [case for case, needed in CASES if needed <= KERNELS[kernel].features]
    found = []
    for sizes, exchange in (((1, 2, 1), "p2p"), ((1, 2, 1), "gather"), ((1, 1, 2), "auto")):
        errors = parity(sizes, cases, kernel, exchange, torch.bfloat16, "cuda")
        found += [(f"{sizes} {exchange} {cases[i]}", what, error) for i, what, error in errors]
    return found


@pytest.mark.parametrize("kernel", ["flash4", "cudnn", "flash", "tiled"])
def test_every_kernel(kernel: str) -> None:
    if not KERNELS[kernel].available(torch.device("cuda", 0)):
        pytest.skip(f"{kernel} is not installed")
    for errors in run_ranks(on_gpu, 2, kernel, timeout=240, backend="nccl"):
        assert errors
        for case, what, error in errors:
            assert error <= BF16, (case, what, error)
