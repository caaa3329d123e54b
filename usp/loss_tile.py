"""What is done to the logits of one tile: on CUDA by a kernel of our own, else in plain torch.

What torch.compile makes of it reads the logits three times and writes the gradient beside them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from usp.batch import IGNORE
from usp.mesh.triton_kernels import kernel_for
from usp.programs import own_programs

BLOCK, WARPS = 8192, 8  # logits of a row at a time; measured on H200: 3.9 TB/s, others 3.5 to 3.8


def tile_pass(logits_TV: Tensor, labels_T: Tensor, *, compiled: bool = False) -> tuple[Tensor, Tensor]:
    """Sum of the losses of one tile, and the gradient of its logits, in their dtype.

    The logits may be written over: the kernel puts the gradient where they were. `compiled`: what the kernel
    does not take is compiled. A label that is no token's is an error of torch's, or NaN from the kernel, in
    the loss and in the gradient.
    """
    kernel = kernel_for(logits_TV, "usp.loss_kernel", "loss_and_gradient")
    if kernel is None or logits_TV.stride(1) != 1:
        found: tuple[Tensor, Tensor] = (_compiled() if compiled else in_plain_torch)(logits_TV, labels_T)
        return found
    num_tokens, vocab = logits_TV.shape
    losses_T = logits_TV.new_empty(num_tokens, dtype=torch.float32)
    if num_tokens:
        with torch.cuda.device_of(logits_TV):  # type: ignore[no-untyped-call]
            kernel[(num_tokens,)](
                logits_TV, labels_T.contiguous(), losses_T, logits_TV.stride(0),
                VOCAB=vocab, IGNORE=IGNORE, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
    return losses_T.sum(), logits_TV


def in_plain_torch(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    """As `tile_pass`."""
    wide = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    valid_T = labels_T != IGNORE
    index_T1 = labels_T.where(valid_T, 0).unsqueeze(1)
    lse_T1 = wide.logsumexp(1, keepdim=True)
    losses_T1 = (lse_T1 - wide.gather(1, index_T1)).where(valid_T.unsqueeze(1), 0.0)
    target = torch.arange(wide.shape[1], device=wide.device) == index_T1
    d_logits = wide.sub_(lse_T1).exp_().add_(target, alpha=-1).mul_(valid_T.unsqueeze(1))
    return losses_T1.sum(), d_logits.to(logits_TV.dtype)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return own_programs(in_plain_torch)
