"""Leaves in another dtype: the bits of `Tensor.to`, contiguous, and no copy where none is needed."""

import torch

from usp.mesh.cast import as_dtype, as_dtypes


def leaves() -> list[torch.Tensor]:
    torch.manual_seed(0)
    tall = torch.randn(7, 5)
    return [tall.bfloat16(), tall.T, tall.double(), torch.zeros(0, 3), torch.randn(())]


def test_equals_torch() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for got, t in zip(as_dtype(leaves(), dtype), leaves(), strict=True):
            assert got.is_contiguous()
            assert torch.equal(got, t.to(dtype))


def test_what_fits_is_handed_back() -> None:
    given = leaves()
    assert as_dtype(given[:1], torch.bfloat16)[0] is given[0]


def test_each_to_its_own() -> None:
    given = [*leaves()[:3], None, torch.ones(2)]
    found = as_dtypes(given, [torch.float32, torch.float64, None, torch.float32, torch.float32])
    assert [None if t is None else t.dtype for t in found] == [
        torch.float32, torch.float64, torch.float64, None, torch.float32,
    ]  # fmt: skip
    assert found[2] is given[2]
