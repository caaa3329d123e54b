"""Kernels of our own in Triton, which is there only with CUDA: what they take, and where they are found."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # what float32 is wide enough for


def kernel_for(t: Tensor, module: str, name: str) -> Any:
    """The kernel `name` of `module` if it takes tensors like t here and now, else None.

    No dtype but `DTYPES`, no subclass of Tensor, such as those without data, nothing that is being traced.
    """
    plain = type(t) in (Tensor, torch.nn.Parameter)
    if not (t.is_cuda and t.dtype in DTYPES and plain) or torch.compiler.is_compiling():
        return None
    return getattr(importlib.import_module(module), name)
