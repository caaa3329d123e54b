"""Columns of one buffer: views whose gradients reach it without a copy, and right in every other case."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from usp.columns import columns, like_columns

HEADS, ROWS = ((4, 3), (2, 3), (2, 5)), 7
WIDTH = sum(num * size for num, size in HEADS)


def joined() -> Tensor:
    return torch.arange(ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).sin()


class Kernel(torch.autograd.Function):
    """3 q, 5 k and 7 v, summed: its gradients lie as its inputs do; `made` records them."""

    made: list[Tensor]

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return sum((i * t).sum() for i, t in zip((3, 5, 7), tensors, strict=True))  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        Kernel.made = like_columns(ctx.saved_tensors)
        return tuple(t.fill_(i * grads[0].item()) for i, t in zip((3, 5, 7), Kernel.made, strict=True))


def expected() -> Tensor:
    return torch.cat(
        [torch.full((ROWS, n * s), i) for i, (n, s) in zip((3.0, 5.0, 7.0), HEADS, strict=True)], 1
    )


def test_the_views_are_the_columns() -> None:
    x, at = joined(), 0
    for t, (num, size) in zip(columns(x, HEADS), HEADS, strict=True):
        assert t.shape == (ROWS, num, size)
        assert torch.equal(t.flatten(1), x[:, at : at + num * size])
        assert t.data_ptr() == x[:, at:].data_ptr()
        at += num * size


def test_gradients_that_lie_alike_are_not_copied() -> None:
    came = joined().requires_grad_() * 1
    got: list[Tensor] = []
    came.register_hook(got.append)
    Kernel.apply(*columns(came, HEADS)).backward()  # type: ignore[no-untyped-call]
    assert got[0].data_ptr() == Kernel.made[0].data_ptr()
    assert got[0].untyped_storage().nbytes() == ROWS * WIDTH * 8
    assert torch.equal(got[0], expected().double())


def test_any_other_gradients_are_joined() -> None:
    x = joined().requires_grad_()
    weights = [torch.randn_like(t) for t in columns(joined(), HEADS)]
    sum((w * t).sum() for w, t in zip(weights, columns(x, HEADS), strict=True)).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.cat([w.flatten(1) for w in weights], 1))


def test_a_tensor_that_is_not_used_has_no_gradient() -> None:
    x = joined().requires_grad_()
    columns(x, HEADS)[1].sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.sum(0) != 0, (torch.arange(WIDTH) >= 12) & (torch.arange(WIDTH) < 18))


def test_memory_for_tensors_that_are_no_columns() -> None:
    q, k, v = columns(joined(), HEADS)
    wide = joined().repeat(1, 2)  # columns that do not fill their buffer
    cases = (
        [q.clone(), k, v],
        [q, k, v.clone()],
        [k, q, v],
        [q, k],
        [q[:4], k[:4], v[2:6]],
        columns(wide[:, :WIDTH], HEADS),
        [q[:0], k[:0], v[:0]],
    )
    for tensors in cases:
        found = like_columns(tensors)
        assert [t.shape for t in found] == [t.shape for t in tensors]
        assert all(t.is_contiguous() for t in found)
    some = like_columns([q[2:5], k[2:5], v[2:5]])
    assert [t.stride() for t in some] == [(WIDTH, size, 1) for _, size in HEADS]


def mixed(x: Tensor) -> Tensor:
    q, k, v = columns(x, HEADS)
    return (q.sum(1) * k.prod(1)).sum() + v.pow(3).sum() + (q * q).sum()


def reference(x: Tensor) -> Tensor:
    q, k, v = (x[:, a:b].view(ROWS, -1, s) for a, b, s in ((0, 12, 3), (12, 18, 3), (18, 28, 5)))
    return (q.sum(1) * k.prod(1)).sum() + v.pow(3).sum() + (q * q).sum()


def tangent(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.requires_grad_(), torch.ones_like(x))
        found = forward_ad.unpack_dual(fn(dual)).tangent
        assert found is not None
        return found


def second(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.requires_grad_()
    (grad,) = torch.autograd.grad(fn(x), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x)[0]


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda fn, x: torch.func.grad(fn)(x),
    "grad of grad": lambda fn, x: torch.func.grad(lambda y: torch.func.grad(fn)(y).square().sum())(x),
    "jvp": lambda fn, x: torch.func.jvp(fn, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda fn, x: torch.func.vmap(torch.func.grad(fn))(torch.stack([x, 2 * x])),
    "plain second derivative": second,
    "plain forward mode": tangent,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_derivative(name: str) -> None:
    found, wanted = (TRANSFORMS[name](fn, joined()) for fn in (mixed, reference))
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)  # the same sums, taken in other orders


class Linear(torch.autograd.Function):
    """Twice each, its backward differentiable: gradients of gradients pass through columns of one buffer."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(2 * t for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        buffer = 2 * torch.cat([g.flatten(1) for g in grads], 1)
        return tuple(columns(buffer, HEADS))


def test_second_derivatives_of_gradients_in_one_buffer() -> None:
    """A view of the whole buffer would be the first tensor's alone to autograd."""

    def doubled(x: Tensor) -> Tensor:
        return sum(t.pow(3).sum() for t in Linear.apply(*columns(x, HEADS)))  # type: ignore[no-untyped-call, return-value]

    torch.testing.assert_close(second(doubled, joined()), second(lambda x: (2 * x).pow(3).sum(), joined()))


def test_gradients_of_many_at_once() -> None:
    """vmap over autograd's own gradient, whose tensors have no memory of their own."""
    x = joined().requires_grad_()
    y = columns(x, HEADS)[0].pow(2)
    ups = torch.randn(3, *y.shape, dtype=y.dtype)
    one_by_one = torch.stack([torch.autograd.grad(y, x, up, retain_graph=True)[0] for up in ups])
    together = torch.func.vmap(lambda up: torch.autograd.grad(y, x, up, retain_graph=True)[0])(ups)
    assert torch.equal(together, one_by_one)
    assert torch.equal(torch.autograd.grad(y, x, ups, is_grads_batched=True)[0], one_by_one)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced(mode: Any) -> None:
    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(mixed(x), x)[0]

    x = joined().requires_grad_()
    program: Any = make_fx(gradient, tracing_mode=mode)(x)
    y = (2 * joined()).requires_grad_()
    # a program takes the derivative of a product apart in another way
    torch.testing.assert_close(program(y), gradient(y), rtol=1e-14, atol=1e-15)
