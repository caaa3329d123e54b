"""The Triton kernel of `usp.mesh.cast`, imported where it is used: only with CUDA is there Triton."""

# pyright: reportMissingImports=false, reportRedeclaration=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ModuleNotFoundError:
    cast: Any = None
else:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def cast(source, target, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """`length` entries in a row, rounded to nearest. One program for BLOCK of them."""
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        there = place < length
        entries = tl.load(source + place, mask=there)
        tl.store(target + place, entries.to(target.dtype.element_ty), mask=there)
