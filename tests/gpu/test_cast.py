"""The kernel that casts large leaves against `Tensor.to`: the same bits."""

import pytest
import torch

from usp.mesh.cast import LARGE, as_dtype

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_equals_torch(source: torch.dtype, target: torch.dtype) -> None:
    """Large and small, in a row and not, all sizes of number, halfway between two, and none."""
    torch.manual_seed(0)
    whole = torch.randint(-(2**31), 2**31 - 1, (LARGE + 77,), dtype=torch.int32, device="cuda")
    numbers = whole.view(torch.float32).to(source)
    halfway = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 65520.0, torch.inf, torch.nan], device="cuda")
    numbers[:5] = halfway.to(source)
    given = [numbers, numbers[:1000], numbers[: LARGE // 2 * 2].view(-1, 2).T]
    for got, t in zip(as_dtype(given, target), given, strict=True):
        assert got.is_contiguous()
        want = t.to(target)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
