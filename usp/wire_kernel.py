"""The Triton kernel of `usp.wire`, imported where it is used: only with CUDA is there Triton."""

# pyright: reportMissingImports=false, reportRedeclaration=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ModuleNotFoundError:
    turn: Any = None
else:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def turn(  # type: ignore[no-untyped-def]
        tensors, strides, wire, cos, sin, length, rows, width,
        NUMS: tl.constexpr, SIZES: tl.constexpr, TURNED: tl.constexpr, POW2: tl.constexpr,
        TOKENS: tl.constexpr, BACK: tl.constexpr,
    ):  # fmt: skip
        """Heads of tensors [B, S, ranks * NUM, SIZE], one tensor's after the other's in wire [ranks, S * B,
        width]: from the first to the second, or BACK. The first TURNED of them by cos, sin [B, S, SIZE].
        `strides`: of B, S and heads, for each. One program for TOKENS tokens and one rank; a head in two
        halves of at most POW2."""
        rank = tl.program_id(1).to(tl.int64)
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        at, b = (token // rows).to(tl.int64), (token % rows).to(tl.int64)
        column = tl.arange(0, POW2)[None, :]
        far = ((rank * length * rows + token) * width)[:, None] + column
        for i in tl.static_range(len(NUMS)):
            x, NUM, SIZE = tensors[i], NUMS[i], SIZES[i]
            HALF = (SIZE + 1) // 2
            there = (token < length * rows)[:, None] & (column < HALF)
            beyond = there & (column + HALF < SIZE)
            near = (b * strides[i][0] + at * strides[i][1])[:, None] + column
            if i < TURNED:
                angle = ((b * length + at) * SIZE)[:, None] + column
                c = tl.load(cos + angle, mask=there, other=0.0).to(tl.float32)
                s = tl.load(sin + angle, mask=there, other=0.0).to(tl.float32)
            for n in range(NUM):
                own = x + near + (rank * NUM + n) * strides[i][2]  # in 64 bits, as rank is
                wired = wire + far + n * SIZE
                source = wired if BACK else own
                first = tl.load(source, mask=there, other=0.0)
                second = tl.load(source + HALF, mask=beyond, other=0.0)
                if i < TURNED:
                    one, two = first.to(tl.float32), second.to(tl.float32)
                    if BACK:
                        first, second = one * c + two * s, two * c - one * s
                    else:
                        first, second = one * c - two * s, two * c + one * s
                target = own if BACK else wired
                tl.store(target, first.to(x.dtype.element_ty), mask=there)
                tl.store(target + HALF, second.to(x.dtype.element_ty), mask=beyond)
            far += NUM * SIZE
