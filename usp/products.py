"""Matrix products summed in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b in float32 or wider, written over `total`; None: nothing yet.

    a [M, K] and b [K, N] of one dtype. On a GPU half precision is summed inside the product, unrounded.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and wide != a.dtype:
        if total is None:
            return torch.mm(a, b, out_dtype=wide)
        return torch.addmm(total, a, b, out_dtype=wide, out=total)
    part = (a @ b).to(wide)
    return part if total is None else total.add_(part)
