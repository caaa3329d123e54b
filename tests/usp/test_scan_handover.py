"""When the scan's backward lets go of what it has used, and when it fetches what comes next."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.usp.dense import normal
from tests.usp.test_scan import equal
from usp import attention, scan, value_and_grad
from usp.arena import Arena, Copied, Copies
from usp.kept import Kept
from usp.tiles import tiled

DEPTH, ROWS, HEADS, SIZE = 4, 5, 2, 3
DIM = HEADS * SIZE
X = normal(ROWS, DIM, seed=50)
EVENTS: list[str] = []
GRADS: list[Any] = []
FETCHED: list[Any] = []
ALIVE: list[int] = []


class _Mark(torch.autograd.Function):
    """x, and an event when its gradient passes."""

    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.name = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        EVENTS.append(ctx.name)
        ALIVE.append(sum(ref() is not None for ref in FETCHED))
        if ctx.name == "result":
            GRADS.append(weakref.ref(grads[0].untyped_storage()))
        elif ctx.name == "input":
            EVENTS.append("held" if GRADS[-1]() is not None else "gone")
        return grads[0] * 1, None


def mark(x: Tensor, name: str) -> Tensor:
    y: Any = _Mark.apply(x, name)  # type: ignore[no-untyped-call]
    return y


class _Logged:
    def __init__(self, copies: Copies) -> None:
        self.copies = copies

    def out(self, t: Tensor, host: Tensor) -> Copied:
        return self.copies.out(t, host)

    def back(self, host: Tensor, device: torch.device) -> Copied:
        EVENTS.append("fetch")
        copied = self.copies.back(host, device)
        if host.dim() == 4:  # attention's output
            FETCHED.append(weakref.ref(copied.tensor.untyped_storage()))
        return copied

    def finish(self) -> None:
        self.copies.finish()


class LoggedArena(Arena):
    def copies(self, device: torch.device) -> Copies:
        return _Logged(super().copies(device))


def layers_of(depth: int = DEPTH) -> list[Tensor]:
    return [normal(DIM, DIM, seed=i) for i in range(depth)]


def plain(x: Tensor, w: Tensor) -> Tensor:
    return mark((mark(x, "input") @ w).sin(), "result")


def with_attention(x: Tensor, w: Tensor, kept: Kept | None = None) -> Tensor:
    q = mark((x @ w).view(1, ROWS, HEADS, SIZE), "input")
    o = attention(q, q, q, kernel="cpu", kept=kept)
    return mark(o.flatten(2).view(ROWS, DIM), "result")


def loss(block: Any, x: Tensor, layers: Any, **how: Any) -> Tensor:
    return scan(block, x, layers, **how).square().sum()


def events_of(block: Any, **how: Any) -> list[str]:
    """Of the backward, and results as those of the scan that keeps everything."""
    want = value_and_grad(partial(loss, block), argnums=(0, 1))(X, layers_of())
    for log in (EVENTS, FETCHED, ALIVE):
        log.clear()
    equal(value_and_grad(partial(loss, block, **how), argnums=(0, 1))(X, layers_of()), want)
    return list(EVENTS)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_gradient_of_a_result_goes_when_it_was_used(remat: str) -> None:
    """Also that of the last layer, which comes from outside."""
    assert events_of(plain, remat=remat) == ["result", "input", "gone"] * DEPTH
    EVENTS.clear()
    x = X.clone().requires_grad_()
    loss(plain, x, layers_of(), remat=remat).backward()
    assert EVENTS == ["result", "input", "gone"] * DEPTH


def test_a_gradient_that_others_hold_is_theirs() -> None:
    """What is passed to `backward`, and what a hook or retain_grad sees, is right and stays as it is."""
    for remat in ("none", "full"):
        x, g = X.clone().requires_grad_(), normal(ROWS, DIM, seed=51)
        y = scan(over_its_gradient if remat == "full" else plain_tiled, x, layers_of(), remat=remat)
        y.retain_grad()
        before = g.clone()
        y.backward(g, retain_graph=True)
        assert y.grad is not None
        assert torch.equal(g, before)
        assert torch.equal(y.grad, before)
        first = x.grad
        want = X.clone().requires_grad_()
        whole = want
        for w in layers_of():
            whole = (whole @ w).sin()
        whole.backward(before)
        assert first is not None
        torch.testing.assert_close(first, want.grad, rtol=1e-12, atol=1e-12)  # float64, other order of sums


def sine(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin()


def plain_tiled(x: Tensor, w: Tensor) -> Tensor:
    return tiled(sine, x, w, tile=2)


def over_its_gradient(x: Tensor, w: Tensor, kept: Kept | None = None) -> Tensor:
    own = kept is not None and kept.own_grad
    EVENTS.append("own" if own else "other's")
    return tiled(sine, x, w, tile=2, own_grad=own)


def passed_on(x: Tensor, w: Tensor, kept: Kept | None = None) -> Tensor:
    EVENTS.append("own" if kept is not None and kept.own_grad else "other's")
    return x + w[0]


@pytest.mark.parametrize("group", [1, 2])
def test_whose_gradient_it_is(group: int) -> None:
    """The last layer's comes from outside; a block that passes its gradient on makes it nobody's own."""
    again = DEPTH if group == 1 else DEPTH + 2
    for block, last in ((over_its_gradient, ["own"]), (passed_on, ["other's"])):
        ran = events_of(block, remat="full", group=group)[-again:]
        wanted = ["other's", *last * (DEPTH - 1)]
        assert ran == (wanted if group == 1 else ["other's", *wanted[:2], "other's", *wanted[2:]])


@pytest.mark.parametrize(("remat", "fetched"), [("attention", 3), ("full", 1)])
def test_the_next_is_fetched_when_attention_is_through(remat: str, fetched: int) -> None:
    layer = ["result", *["fetch"] * fetched, "input", "gone"]
    last = ["result", "input", "gone"]
    got = events_of(with_attention, remat=remat, offload="host", arena=LoggedArena())
    assert got == layer * (DEPTH - 1) + last


def test_groups_fetch_what_their_forward_needs_at_its_start() -> None:
    """Layers 2 and 3, then 0 and 1: a forward of 2 first, and of 0."""
    got = events_of(with_attention, remat="attention", group=2, offload="host", arena=LoggedArena())
    two, last = ["fetch"] * 2, ["result", "input", "gone"]
    assert got == [
        *["fetch"] * 3,  # for the forward of 2; 3 stays
        *["result", *two, "input", "gone"],  # 3, and what 2 kept
        *["result", *["fetch"] * 3, "input", "gone"],  # 2, and all of 0
        *two,  # the forward of 0, and what 1 kept
        *["result", *two, "input", "gone"],
        *last,
    ]


def test_a_block_that_does_not_say_when_it_is_through() -> None:
    """What comes next is fetched behind its whole backward."""
    got = events_of(plain, remat="full", offload="host", arena=LoggedArena())
    assert got == ["fetch", "result", "input", "gone"] * (DEPTH - 1) + ["result", "input", "gone"]


def test_what_was_kept_goes_when_it_was_read() -> None:
    """Attention's output: until its backward is through only this layer's is there, then only the next's."""
    events_of(with_attention, remat="attention", offload="host", arena=LoggedArena())
    assert ALIVE == [0, 1] + [1, 1] * (DEPTH - 2) + [1, 0]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_result_without_a_history(remat: str) -> None:
    """The second block lets no gradient through: zeros, not an error."""
    ends = iter([False, True] * 2)

    def block(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).detach() if next(ends) else x * w

    layers = [normal(ROWS, DIM, seed=80 + i) for i in range(2)]
    if remat == "full":
        ends = iter([False, True, True, False])
    grads = value_and_grad(lambda p: scan(block, p[0], p[1], remat=remat).sum())((X, layers))[1]
    for g in (grads[0], *grads[1]):
        assert torch.equal(g, torch.zeros_like(g))


def test_a_gradient_that_a_leaf_has_too() -> None:
    """x and a leaf added to it get one gradient, in one memory: nobody may write over it."""

    def plus(x: Tensor, leaves: tuple[Tensor, Tensor], kept: Kept | None = None) -> Tensor:
        own = kept is not None and kept.own_grad
        return tiled(lambda t, w: t + torch.sin(t @ w), x + leaves[0], leaves[1], tile=2, own_grad=own)

    layers = [(normal(ROWS, DIM, seed=60 + i), normal(DIM, DIM, seed=70 + i)) for i in range(DEPTH)]

    def plain(x: Tensor, layers: Any) -> Tensor:
        for pos, w in layers:
            x = x + pos
            x = x + torch.sin(x @ w)
        return x.square().sum()

    x = X.clone().requires_grad_()
    leaves = [tuple(t.clone().requires_grad_() for t in layer) for layer in layers]
    flat = [t for layer in leaves for t in layer]
    want = torch.autograd.grad(plain(x, leaves), [x, *flat])
    _, grads = value_and_grad(lambda p: scan(plus, p[0], p[1], remat="full").square().sum())((X, layers))
    for got, wish in zip([grads[0], *(t for layer in grads[1] for t in layer)], want, strict=True):
        torch.testing.assert_close(got, wish, rtol=1e-12, atol=1e-12)  # products of other sizes


def test_copies_are_waited_for_after_an_error() -> None:
    """Memory that is still written to would be given away else."""
    waited: list[Any] = []

    class Failed(Exception):
        pass

    runs = iter(range(2 * DEPTH))

    def fails(x: Tensor, w: Tensor, kept: Kept) -> Tensor:
        if next(runs) == DEPTH + 1:  # the second run of the backward, with a kept tensor not yet asked for
            raise Failed
        kept.get(lambda: x.detach())
        return x * w

    with (
        patch("usp.scan.memory.wait_for", lambda event, device: waited.append(event)),
        pytest.raises(Failed),
    ):
        value_and_grad(
            lambda x: scan(fails, x, [X] * DEPTH, remat="attention", offload="host", arena=Arena()).sum()
        )(X)
    assert len(waited) == 1
