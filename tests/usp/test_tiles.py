"""`tiled`: the same as the function itself, with one tile of memory, and exact sums of weight gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad

from tests.usp.dense import Watch, normal
from usp import value_and_grad
from usp.tiles import tiled

DIM, WIDE = 5, 64
# float64 sums of at most 42 tokens' terms in another order, relative to the largest entry
ROUNDING = 1e-13


def mlp(x: Tensor, w: dict[str, Any]) -> Tensor:
    h = F.silu(F.linear(x, w["gate"], w["bias"])) * F.linear(x, w["up"])
    return F.linear(h, w["down"])


def weights(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> dict[str, Any]:
    return {
        "gate": normal(WIDE, DIM, seed=1, dtype=dtype),
        "bias": normal(WIDE, seed=2, dtype=dtype) if bias else None,
        "up": normal(WIDE, DIM, seed=3, dtype=dtype),
        "down": normal(DIM + 1, WIDE, seed=4, dtype=dtype),
    }


def close(got: Tensor, want: Tensor, tolerance: float = ROUNDING) -> bool:
    return got.shape == want.shape and bool((got - want).abs().max() <= tolerance * want.abs().max())


@pytest.mark.parametrize("tile", [1, 4, 7, 42, 100])
@pytest.mark.parametrize("shape", [(42, DIM), (1, 42, DIM), (3, 14, DIM), (2, 3, 7, DIM)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_equal_to_the_whole(bias: bool, shape: tuple[int, ...], tile: int) -> None:
    # case D42: any batch size; tiles do not stop at rows' ends
    x, w, c = normal(*shape, seed=9), weights(bias=bias), normal(*shape[:-1], DIM + 1, seed=8)
    want_value, want = value_and_grad(lambda x, w: (c * mlp(x, w)).sum(), (0, 1))(x, w)
    value, got = value_and_grad(lambda x, w: (c * tiled(mlp, x, w, tile=tile)).sum(), (0, 1))(x, w)
    assert close(value, want_value, 1e-12)  # the sum cancels
    assert close(got[0], want[0])
    assert got[1]["bias"] is None if not bias else close(got[1]["bias"], want[1]["bias"])
    for name in ("gate", "up", "down"):
        assert close(got[1][name], want[1][name])
    assert close(grad(lambda x: (c * tiled(mlp, x, w, tile=tile)).sum())(x), want[0])


def test_only_what_is_asked_for() -> None:
    # case D48: every parameter that trains is found, frozen ones get nothing
    x, w = normal(6, DIM, seed=9), weights()
    w["up"].requires_grad_()
    tiled(mlp, x, w, tile=4).square().sum().backward()
    assert [name for name, t in w.items() if t.grad is not None] == ["up"]
    held = w["down"].clone().requires_grad_()
    with pytest.raises(ValueError, match="fn must hold no tensor that requires a gradient"):
        tiled(lambda x, w: x @ held, x, w, tile=4)


def test_no_tokens() -> None:
    x, w = normal(2, 0, DIM, seed=9), weights()
    value, (dx, dw) = value_and_grad(lambda x, w: tiled(mlp, x, w, tile=4).sum(), (0, 1))(x, w)
    assert value == 0
    assert dx.shape == x.shape
    assert torch.equal(dw["up"], torch.zeros_like(w["up"]))


def test_memory_of_one_tile() -> None:
    x, w = normal(64, DIM, seed=9), weights()
    with Watch() as watch:
        value_and_grad(lambda x, w: tiled(mlp, x, w, tile=4).sum(), (0, 1))(x, w)
    assert watch.largest == max(t.numel() for t in (x, *w.values()))  # never [T, F]: 64 * 64
    with Watch() as whole:
        value_and_grad(lambda x, w: mlp(x, w).sum(), (0, 1))(x, w)
    assert whole.largest == 64 * WIDE


def test_tiles_depend_on_shapes_alone() -> None:
    # case D45
    def operations(x: Tensor) -> list[str]:
        with Watch() as watch:
            value_and_grad(lambda w: tiled(mlp, x, w, tile=4).sum())(weights())
        return watch.ops

    assert operations(normal(10, DIM, seed=1)) == operations(torch.zeros(10, DIM, dtype=torch.float64))


def test_bfloat16_sums_in_float32() -> None:
    # case D49: 1024 tiles whose parts have one sign, so that a bfloat16 sum would stop growing
    x, w = torch.ones(4096, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    got = value_and_grad(lambda w: tiled(F.linear, x, w, tile=4).float().sum())(w)[1]
    assert got.dtype == torch.bfloat16
    assert got.item() == 4096.0
    naive = torch.zeros(1, 1, dtype=torch.bfloat16)
    for _ in range(1024):
        naive += 4
    assert naive.item() < 4096.0  # what it would be without


def test_the_saved_input_is_not_written() -> None:
    # case D54
    x, w = normal(10, DIM, seed=9), weights()
    versions = [t._version for t in (x, *w.values())]
    value_and_grad(lambda x, w: tiled(mlp, x, w, tile=4).sum(), (0, 1))(x, w)
    assert [t._version for t in (x, *w.values())] == versions


def test_random_numbers_are_drawn_again() -> None:
    def noisy(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(x, 0.5) * w

    x, w = normal(9, DIM, seed=9), normal(DIM, seed=1)
    torch.manual_seed(3)
    leaf = x.clone().requires_grad_()
    y = tiled(noisy, leaf, w, tile=4)
    (dx,) = torch.autograd.grad(y.sum(), leaf)
    assert torch.equal(dx * x, y)  # the same entries were dropped


def test_a_re_run_whose_value_is_not_read() -> None:
    def square(x: Tensor, w: Any) -> Tensor:
        return mlp(x, w)[..., :DIM]

    x, w = normal(2, 5, DIM, seed=9), weights()
    c = normal(2, 5, DIM, seed=8)
    y = tiled(square, x, w, tile=4, value=False)
    assert torch.equal(y, torch.zeros(2, 5, DIM, dtype=torch.float64))
    assert y.untyped_storage().nbytes() == 8  # takes no memory
    want = grad(lambda x, w: (c * square(x, w)).sum(), (0, 1))(x, w)
    got = grad(lambda x, w: (c * tiled(square, x, w, tile=4, value=False)).sum(), (0, 1))(x, w)
    assert close(got[0], want[0])
    assert close(got[1]["down"], want[1]["down"])


def test_the_gradient_of_the_input_over_that_of_the_result() -> None:
    def square(x: Tensor, w: Any) -> Tensor:
        return mlp(x, w)[..., :DIM]

    x, w, c = normal(2, 5, DIM, seed=9), weights(), normal(2, 5, DIM, seed=8)
    want = grad(lambda x, w: (c * square(x, w)).sum(), (0, 1))(x, w)
    for given in (c.clone(), normal(DIM, seed=7).expand(2, 5, DIM)):
        before, leaf = given.clone(), x.clone().requires_grad_()
        y = tiled(square, leaf, w, tile=4, own_grad=True)
        (got,) = torch.autograd.grad(y, leaf, given)
        written = given.is_contiguous()  # where rows share their memory there is no room
        assert (got.data_ptr() == given.data_ptr()) == written
        assert torch.equal(given, before) != written
        if written:
            assert close(got, want[0])
    leaf = x.clone().requires_grad_()
    (c3,) = torch.autograd.grad(
        tiled(mlp, leaf, w, tile=4, own_grad=True), leaf, normal(2, 5, DIM + 1, seed=8)
    )
    assert c3.shape == x.shape  # another width: no room either


def test_refused() -> None:
    x, w = normal(4, DIM, seed=9), weights()
    with pytest.raises(ValueError, match="tile=0 must be at least 1"):
        tiled(mlp, x, w, tile=0)
    with pytest.raises(RuntimeError, match="tiled gives first derivatives only"):
        grad(lambda x: grad(lambda x: tiled(mlp, x, w, tile=4).sum())(x).sum())(x)
