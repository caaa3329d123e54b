"""The tensors of a checkpoint directory, compared byte for byte."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def tensors_of(path: Path) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        part = load_file(file)
        assert not out.keys() & part.keys()
        out |= part
    return out


def assert_same_bytes(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name].view(torch.uint8), value.view(torch.uint8)), name
