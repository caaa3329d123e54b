"""Heads to and from the order in which they travel, on CUDA: one pass over memory, rotation included.

The wire is [ranks, S, B, columns]: for every rank the tokens of a row in order, and of each token that rank's
heads of all tensors, one tensor after the other. Plain torch says the same in `usp.heads.wire`; what
eager torch and torch.compile make of it was measured at a quarter and, with the rotation and for any length,
at a tenth of the memory's speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from usp.levels import levels
from usp.mesh.triton_kernels import kernel_for

ENTRIES = 2048  # of each half of the heads that one program holds at a time: 16 a thread
Heads = tuple[tuple[int, int], ...]
"""(number, size) of all heads of each tensor."""


def can_wire(x: Tensor) -> bool:
    """Whether this module takes tensors like x here and now: it has no vmap."""
    return not levels() and _kernel(x) is not None


def _kernel(x: Tensor) -> Any:
    return kernel_for(x, "usp.wire_kernel", "turn")


def to_wire(tensors: Sequence[Tensor], ranks: int, *, turn: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Each [B, S, N, H], N divisible by `ranks`, -> [ranks, S, B, sum of N / ranks * H].

    turn: cos, sin [B, S, 1, H] that hold every angle twice, for all tensors but the last to be rotated by: in
    float32, rounded once. Differentiable any number of times. Communicates nothing.
    """
    return _wired(tensors, ranks, len(tensors) - 1, turn)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, N, H], in rows of any distance, rotated as `to_wire` does."""
    rows, length, *heads = x.shape
    return _wired([x], 1, 1, (cos, sin)).view(length, rows, *heads).transpose(0, 1)


def _wired(
    tensors: Sequence[Tensor], ranks: int, num_turned: int, turn: tuple[Tensor, Tensor] | None
) -> Tensor:
    heads = tuple((t.shape[2], t.shape[3]) for t in tensors)
    cos, sin = (None, None) if turn is None else (t.contiguous() for t in turn)
    return cast(Tensor, _ToWire.apply(_Move(heads, ranks, num_turned), cos, sin, *tensors))  # type: ignore[no-untyped-call]


def from_wire(wire: Tensor, heads: Heads) -> list[Tensor]:
    """[ranks, S, B, columns] -> [B, S, N, H] of each tensor, the transpose of `to_wire`.

    The gradient of a single tensor of as many heads as there are ranks is not copied if it lies as the wire.
    """
    found = _FromWire.apply(_Move(heads, wire.shape[0]), wire.contiguous(), None, None)  # type: ignore[no-untyped-call]
    return list(found)


@dataclass(frozen=True)
class _Move:
    heads: Heads
    ranks: int
    num_turned: int = 0
    """The first so many are rotated where there is an angle."""

    def width(self) -> int:
        return sum(num // self.ranks * size for num, size in self.heads)

    def run(
        self, tensors: Sequence[Tensor], wire: Tensor, cos: Tensor | None, sin: Tensor | None, *, back: bool
    ) -> None:
        """All tensors in one launch."""
        assert all(t.dtype == wire.dtype for t in tensors), "tensors of one dtype"
        ranks, length, rows, width = wire.shape
        half = -(-max(size for _, size in self.heads) // 2)
        pow2 = 1 << (half - 1).bit_length()
        tokens = max(1, ENTRIES // pow2)
        grid = (-(-length * rows // tokens), ranks)
        if 0 in (*grid, width):
            return
        with torch.cuda.device_of(wire):  # type: ignore[no-untyped-call]
            _kernel(wire)[grid](
                tuple(tensors), tuple(t.stride()[:3] for t in tensors), wire,
                wire if cos is None else cos, wire if sin is None else sin,  # not read without a turn
                length, rows, width,
                NUMS=tuple(n // ranks for n, _ in self.heads), SIZES=tuple(size for _, size in self.heads),
                TURNED=0 if cos is None else self.num_turned, POW2=pow2, TOKENS=tokens, BACK=back,
            )  # fmt: skip


class _ToWire(torch.autograd.Function):
    @staticmethod
    def forward(move: _Move, cos: Tensor | None, sin: Tensor | None, *tensors: Tensor) -> Tensor:
        rows, length = tensors[0].shape[:2]
        wire = tensors[0].new_empty(move.ranks, length, rows, move.width())
        move.run([_rows(t) for t in tensors], wire, cos, sin, back=False)
        return wire

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.move, cos, sin, *_ = inputs
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return cast(Tensor, _ToWire.apply(ctx.move, *ctx.saved_tensors, *tangents[3:]))  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return None, None, None, *_FromWire.apply(ctx.move, grads[0].contiguous(), *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class _FromWire(torch.autograd.Function):
    """The transpose: turned back, in the order of the heads."""

    @staticmethod
    def forward(move: _Move, wire: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, ...]:
        _, length, rows, _ = wire.shape
        found = [wire.new_empty(rows, length, num, size) for num, size in move.heads]
        move.run(found, wire, cos, sin, back=True)
        return tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.move, _, cos, sin = inputs
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        return cast("tuple[Tensor, ...]", _FromWire.apply(ctx.move, tangents[1], *ctx.saved_tensors))  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        as_sent = grads[0].permute(2, 1, 0, 3)
        alone = cos is None and len(grads) == 1 and grads[0].shape[2] == ctx.move.ranks
        if alone and as_sent.is_contiguous():
            return None, as_sent, None, None
        return None, _ToWire.apply(ctx.move, cos, sin, *grads), None, None  # type: ignore[no-untyped-call]


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()
