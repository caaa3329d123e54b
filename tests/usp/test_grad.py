"""`value_and_grad`: jax's meaning, and autograd's memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vmap

from tests.usp.dense import Watch, normal
from usp import value_and_grad


class Layer(NamedTuple):
    weight: Tensor
    bias: Tensor | None


def params() -> dict[str, Any]:
    return {
        "layers": [Layer(normal(3, 3, seed=1), normal(3, seed=2)), Layer(normal(3, 3, seed=3), None)],
        "n": 4,
    }


def loss(p: dict[str, Any], x: Tensor, factor: float = 1.0) -> Tensor:
    for layer in p["layers"]:
        x = torch.tanh(x @ layer.weight.T + (0 if layer.bias is None else layer.bias))
    return factor * p["n"] * x.square().sum()


def test_structure_and_values() -> None:
    p, x = params(), normal(5, 3, seed=4)
    value, grads = value_and_grad(loss)(p, x)
    leaves = [t.requires_grad_() for t in (p["layers"][0].weight, p["layers"][0].bias, p["layers"][1].weight)]
    expected = loss(p, x)
    want = torch.autograd.grad(expected, leaves)
    assert torch.equal(value, expected.detach())
    first, second = grads["layers"]
    assert isinstance(first, Layer)
    assert torch.equal(first.weight, want[0])
    assert first.bias is not None
    assert torch.equal(first.bias, want[1])
    assert torch.equal(second.weight, want[2])
    assert second.bias is None  # None where no tensor is
    assert grads["n"] is None
    assert grads.keys() == p.keys()


def test_results_hold_no_graph() -> None:
    p = params()
    p["layers"][0].weight.requires_grad_()  # as the parameters of a module would
    (value, aux), grads = value_and_grad(lambda p, x: (loss(p, x), {"twice": 2 * x}), has_aux=True)(
        p, normal(5, 3, seed=4)
    )
    for t in (value, aux["twice"], grads["layers"][0].weight):
        assert not t.requires_grad
        assert t.grad_fn is None


def test_argnums() -> None:
    p, x = params(), normal(5, 3, seed=4)
    _, grad_p = value_and_grad(loss)(p, x)
    _, grad_x = value_and_grad(loss, argnums=1)(p, x)
    _, both = value_and_grad(loss, argnums=(1, 0))(p, x)
    assert isinstance(both, tuple)
    assert torch.equal(both[0], grad_x)
    assert torch.equal(both[1]["layers"][0].weight, grad_p["layers"][0].weight)
    assert torch.equal(value_and_grad(loss, argnums=-1)(p, x)[1], grad_x)
    _, one = value_and_grad(loss, argnums=(1,))(p, x)
    assert isinstance(one, tuple)
    assert torch.equal(value_and_grad(loss, argnums=1)(p, x, factor=2.0)[1], 2 * grad_x)


def test_has_aux() -> None:
    x = normal(5, 3, seed=4)
    (value, aux), grads = value_and_grad(lambda x: (x.square().sum(), {"x": x + 1, "n": 3}), has_aux=True)(x)
    assert torch.equal(value, x.square().sum())
    assert torch.equal(aux["x"], x + 1)
    assert aux["n"] == 3
    assert torch.equal(grads, 2 * x)


def test_what_the_value_does_not_depend_on_has_a_gradient_of_zero() -> None:
    x = {"used": normal(3, seed=1), "unused": normal(2, seed=2)}
    _, grads = value_and_grad(lambda p: p["used"].sum())(x)
    assert torch.equal(grads["unused"], torch.zeros_like(x["unused"]))
    value, nothing = value_and_grad(lambda _: torch.ones(()))(None)
    assert (value.item(), nothing) == (1.0, None)


def test_the_same_tensor_twice() -> None:
    x = normal(3, seed=1)
    _, (a, b) = value_and_grad(lambda p: (p[0] * p[1].square()).sum())((x, x))
    assert torch.equal(a, x.square())
    assert torch.equal(b, 2 * x * x)


def test_under_vmap() -> None:
    xs = normal(4, 3, seed=1)
    values, grads = vmap(value_and_grad(lambda x: x.pow(3).sum()))(xs)
    assert torch.allclose(values, xs.pow(3).sum(1), rtol=1e-14)  # another order of 3 terms
    assert torch.equal(grads, 3 * xs**2)


@pytest.mark.parametrize("shape", [(1,), (2, 3)])
def test_value_must_be_a_scalar(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="value must be a scalar, got shape"):
        value_and_grad(lambda x: x * 2)(torch.ones(shape))


def test_refused_where_its_derivative_would_be_lost() -> None:
    def f(x: Tensor) -> Tensor:
        return value_and_grad(lambda y: y.pow(3).sum())(x)[1].sum()

    x = torch.ones(3)
    transforms: tuple[Callable[[], Any], ...] = (
        lambda: grad(f)(x),
        lambda: vmap(grad(f))(torch.ones(2, 3)),
        lambda: jvp(f, (x,), (x,)),
        lambda: value_and_grad(f)(x),
    )
    for run in transforms:
        with pytest.raises(ValueError, match="value_and_grad must be outermost"):
            run()
    assert f(x).item() == 9.0


def test_memory_is_that_of_autograd() -> None:
    """Section 7 of the design: torch.func.grad keeps the backward's graph as well, 3.5 times the peak."""
    weights = [normal(64, 64, seed=i, dtype=torch.float32) for i in range(8)]
    x = normal(512, 64, seed=9, dtype=torch.float32)

    def mlp(weights: list[Tensor]) -> Tensor:
        y = x
        for w in weights:
            y = torch.nn.functional.silu(y @ w)
        return y.square().mean()

    def peak(run: Callable[[], Any]) -> int:
        with Watch() as watch:
            kept = run()
        del kept
        return watch.peak

    def autograd() -> Any:
        leaves = [w.clone().requires_grad_() for w in weights]
        return torch.autograd.grad(mlp(leaves), leaves)

    plain, ours = peak(autograd), peak(lambda: value_and_grad(mlp)(weights))
    assert ours <= 1.05 * plain  # a scalar or two differ
    assert (
        peak(lambda: grad_and_value(mlp)(weights)) > 1.8 * ours
    )  # the measurement sees a graph that is kept


def test_nothing_is_alive_afterwards() -> None:
    w = normal(64, 64, seed=1, dtype=torch.float32)
    with Watch() as watch:
        value, grads = value_and_grad(lambda w: (w @ w).tanh().square().sum())(w)
        assert watch.live == value.nbytes + grads.nbytes
