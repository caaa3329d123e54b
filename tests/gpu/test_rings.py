"""Two GPUs: attention over a ring, and over heads, with every kernel in bfloat16 against dense float64."""

import pytest
import torch

from tests.ranks import run_ranks
from tests.usp.rings import Case, Job, parity
from usp.kernels import KERNELS, PACKED, SOFTCAP, WINDOW
from usp.kernels.padding import padded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
EDGES = (0, 3, 130, 256, 257, 512)
ODD = (0, 1, 67, 200, 268)  # of 268 tokens, in a ring pieces of 67
CASES = [
    (Case((1, 512, 8, 2, 64, 64)), set()),
    (Case((2, 256, 9, 3, 128, 128), None, False), set()),
    (Case((1, 512, 8, 4, 64, 64), EDGES), {PACKED}),
    (Case((1, 512, 8, 2, 128, 128), None, True, 100, True), {WINDOW}),
    (Case((1, 512, 4, 2, 64, 64), EDGES, True, 70, False, 5.0), {PACKED, WINDOW, SOFTCAP}),
    (Case((1, 268, 8, 2, 64, 64), ODD, False), {PACKED}),
    (Case((1, 268, 4, 1, 64, 64), None, True, None, True), set()),  # one kv head, sinks without a window
    (Case((1, 268, 8, 2, 64, 48)), set()),  # v of a size of its own: padded, or as the kernel takes it
]
UNEVEN = [  # what only heads are traded for: ranks with 259 and 258 tokens, and with 5 and 4 heads
    (Case((1, 517, 9, 3, 64, 64)), set()),
    (Case((1, 517, 8, 2, 64, 64), (0, 1, 400, 517), False, None, True), {PACKED}),
]
PLACES = [
    ((1, 2, 1), "p2p", "usp", CASES),
    ((1, 2, 1), "gather", "usp", CASES),
    ((1, 1, 2), "auto", "usp", [*CASES, *UNEVEN]),
    ((1, 2, 1), "auto", "odysseus", CASES[:3]),
    ((1, 1, 2), "auto", "odysseus", [*CASES[:3], *UNEVEN]),
    ((1, 1, 2), "auto", "replicated", CASES[:3]),
]
# bfloat16 rounds by 2^-9 of a number: the weights, the result and the partial gradients, once each
BF16 = 8 * 2.0**-8


def on_gpu(rank: int, world: int, kernel: str) -> list[tuple[str, str, float]]:
    taken = KERNELS[kernel]
    found = []
    for sizes, exchange, table, wanted in PLACES:
        cases = [c for c, needed in wanted if needed <= taken.features and padded(taken, *c.shape[4:])]
        errors = parity(Job(sizes, cases, kernel, exchange, table, torch.bfloat16, "cuda"))
        found += [(f"{sizes} {exchange} {table} {cases[i]}", what, error) for i, what, error in errors]
    return found


@pytest.mark.parametrize("kernel", ["flash4", "cudnn", "flash", "tiled"])
def test_every_kernel(kernel: str) -> None:
    if not KERNELS[kernel].available(torch.device("cuda", 0)):
        pytest.skip(f"{kernel} is not installed")
    for errors in run_ranks(on_gpu, 2, kernel, timeout=240, backend="nccl"):
        assert len(errors) > 20 * 4
        for case, what, error in errors:
            assert error <= BF16, (case, what, error)
