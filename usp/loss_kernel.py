"""The Triton kernel of `usp.loss_tile`, imported where it is used: only with CUDA is there Triton."""

# pyright: reportMissingImports=false, reportRedeclaration=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ModuleNotFoundError:
    loss_and_gradient: Any = None
else:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def loss_and_gradient(  # type: ignore[no-untyped-def]
        logits, labels, losses, row, VOCAB: tl.constexpr, IGNORE: tl.constexpr, BLOCK: tl.constexpr
    ):
        """The loss of one token into `losses` [T], and over its `logits` [T, VOCAB], rows `row` apart, their
        gradient. Of a label that is no token's both are NaN.

        One program for one token. The sum is carried on from block to block, so that it takes one look
        (Milakov and Gimelshein, arXiv 1805.02867).
        """
        token = tl.program_id(0)
        label = tl.load(labels + token)
        start = logits + token.to(tl.int64) * row
        column = tl.arange(0, BLOCK)
        if label == IGNORE:
            for first in range(0, VOCAB, BLOCK):
                nothing = tl.zeros([BLOCK], logits.dtype.element_ty)
                tl.store(start + first + column, nothing, mask=first + column < VOCAB)
            tl.store(losses + token, 0.0)
        else:
            known = (label >= 0) & (label < VOCAB)
            picked = tl.load(start + label, mask=known, other=float("nan")).to(tl.float32)
            largest = -float("inf")
            total = tl.zeros([BLOCK], tl.float32)
            for first in range(0, VOCAB, BLOCK):
                there = first + column < VOCAB
                block = tl.load(start + first + column, mask=there, other=-float("inf")).to(tl.float32)
                more = tl.maximum(largest, tl.max(block, 0))
                level = tl.where(more == -float("inf"), 0.0, more)  # nothing but -inf so far
                total = total * tl.exp(largest - level) + tl.exp(block - level)
                largest = more
            log_sum = tl.where(known, largest + tl.log(tl.sum(total, 0)), float("nan"))
            tl.store(losses + token, log_sum - picked)
            for first in range(0, VOCAB, BLOCK):
                there = first + column < VOCAB
                block = tl.load(start + first + column, mask=there, other=0.0).to(tl.float32)
                share = tl.exp(block - log_sum) - tl.where(first + column == label, 1.0, 0.0)
                tl.store(start + first + column, share.to(logits.dtype.element_ty), mask=there)
