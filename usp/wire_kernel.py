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
        x, wire, cos, sin, length, rows, start, width, x_b, x_s, x_n,
        NUM: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, POW2: tl.constexpr,
        TOKENS: tl.constexpr, BACK: tl.constexpr, TURN: tl.constexpr,
    ):  # fmt: skip
        """Heads rank * NUM and on of x [B, S, N, SIZE], and columns `start` and on of the rank's part of wire
        [ranks, S * B, width]: from the first to the second, or BACK. TURN: by cos, sin [B, S, SIZE]. One
        program for TOKENS tokens and one rank; a head in two halves."""
        rank = tl.program_id(1).to(tl.int64)
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        at, b = (token // rows).to(tl.int64), (token % rows).to(tl.int64)
        column = tl.arange(0, POW2)
        there = (token < length * rows)[:, None] & (column < HALF)[None, :]
        beyond = there & (column + HALF < SIZE)[None, :]
        near = (b * x_b + at * x_s + rank * NUM * x_n)[:, None] + column[None, :]
        far = ((rank * length * rows + token) * width + start)[:, None] + column[None, :]
        if TURN:
            angle = ((b * length + at) * SIZE)[:, None] + column[None, :]
            c = tl.load(cos + angle, mask=there, other=0.0).to(tl.float32)
            s = tl.load(sin + angle, mask=there, other=0.0).to(tl.float32)
        for n in range(NUM):
            own, wired = x + near + n * x_n, wire + far + n * SIZE
            source = wired if BACK else own
            first = tl.load(source, mask=there, other=0.0)
            second = tl.load(source + HALF, mask=beyond, other=0.0)
            if TURN:
                one, two = first.to(tl.float32), second.to(tl.float32)
                if BACK:
                    first, second = one * c + two * s, two * c - one * s
                else:
                    first, second = one * c - two * s, two * c + one * s
            target = own if BACK else wired
            tl.store(target, first.to(x.dtype.element_ty), mask=there)
            tl.store(target + HALF, second.to(x.dtype.element_ty), mask=beyond)
