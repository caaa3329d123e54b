"""`scan`: remat changes what is remembered, never a bit of the result."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch.func import grad, jvp

from tests.usp.dense import Watch, normal
from usp import scan, value_and_grad

DEPTH = 5


class Layer(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    more: dict[str, Any]


def layer(seed: int, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> Layer:
    more = {"scale": normal(1, seed=seed + 200, dtype=dtype), "none": None}
    return Layer(
        normal(6, 6, seed=seed, dtype=dtype), normal(6, seed=seed + 100, dtype=dtype) if bias else None, more
    )


def block(x: Tensor, w: Layer, shift: Tensor | None = None, index: Tensor | None = None) -> Tensor:
    y = x @ w.weight
    if w.bias is not None:
        y = y + w.bias
    if shift is not None:
        y = y + shift
    if index is not None:
        y = y.index_select(0, index)
    return x + w.more["scale"] * torch.nn.functional.silu(y)


LAYERS = tuple(layer(i) for i in range(DEPTH))
X = normal(7, 6, seed=50, dtype=torch.float32)
CONSTS = (
    normal(6, seed=60, dtype=torch.float32),
    torch.randperm(7, generator=torch.Generator().manual_seed(0)),
)


def equal(a: Any, b: Any) -> None:
    flat_a, tree_a = pytree.tree_flatten(a)
    flat_b, tree_b = pytree.tree_flatten(b)
    assert tree_a == tree_b
    for x, y in zip(flat_a, flat_b, strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x is y


@pytest.mark.parametrize("consts", [(), (None, CONSTS[1]), CONSTS], ids=["none", "one", "two"])
@pytest.mark.parametrize("bias", [True, False])
def test_full_equals_none_to_the_last_bit(bias: bool, consts: tuple[Any, ...]) -> None:
    layers = [layer(i, bias=bias) for i in range(DEPTH)]

    def loss(x: Tensor, layers: Any, remat: str) -> Tensor:
        return scan(block, x, layers, *consts, remat=remat).square().sum()

    results = [value_and_grad(partial(loss, remat=r), argnums=(0, 1))(X, layers) for r in ("none", "full")]
    equal(*results)
    by_grad = grad(partial(loss, remat="full"), argnums=0)(X, layers)
    equal(by_grad, results[0][1][0])
    leaves = [w.weight.clone().requires_grad_() for w in layers]
    loss(X, [w._replace(weight=leaf) for w, leaf in zip(layers, leaves, strict=True)], "full").backward()
    for leaf, g in zip(leaves, results[0][1][1], strict=True):
        equal(leaf.grad, g.weight)


def test_equal_to_a_loop() -> None:
    def loop(x: Tensor, layers: Any) -> Tensor:
        for w in layers:
            x = block(x, w, *CONSTS)
        return x.square().sum()

    want = value_and_grad(loop, argnums=(0, 1))(X, LAYERS)
    for remat in ("none", "full"):
        got = value_and_grad(
            lambda x, layers, remat=remat: scan(block, x, layers, *CONSTS, remat=remat).square().sum(),
            argnums=(0, 1),
        )(X, LAYERS)
        equal(got, want)


def test_the_block_runs_once_more_per_layer() -> None:
    calls = []

    def counted(x: Tensor, w: Layer) -> Tensor:
        calls.append(None)
        return block(x, w)

    for remat, times in (("none", DEPTH), ("full", 2 * DEPTH)):
        calls.clear()
        value_and_grad(lambda x, remat=remat: scan(counted, x, LAYERS, remat=remat).sum())(X)
        assert len(calls) == times


def test_what_the_block_leaves_unused() -> None:
    """A gradient of zero, as without remat; an integer leaf has none."""

    def partly(x: Tensor, w: dict[str, Tensor]) -> Tensor:
        return (x * w["used"]).index_select(1, w["order"])

    order = torch.tensor([2, 0, 1])
    floats = [{"used": normal(3, seed=i), "unused": normal(2, seed=i)} for i in range(3)]
    x = normal(4, 3, seed=9)
    results = []
    for remat in ("none", "full"):

        def loss(layers: Any, remat: str = remat) -> Tensor:
            return scan(partly, x, [w | {"order": order} for w in layers], remat=remat).square().sum()

        results.append(value_and_grad(loss)(floats))
    equal(*results)
    assert torch.equal(results[1][1][0]["unused"], torch.zeros(2, dtype=torch.float64))


def test_a_block_may_leave_out_x() -> None:
    def reset(x: Tensor, w: dict[str, Any]) -> Tensor:
        return w["scale"].expand(4, 3) if w["reset"] is not None else x * w["scale"]

    layers = [{"scale": normal(3, seed=i), "reset": None if i != 1 else torch.zeros(())} for i in range(3)]
    results = [
        value_and_grad(lambda x, p, r=r: scan(reset, x, p, remat=r).square().sum(), (0, 1))(
            normal(4, 3, seed=9), layers
        )
        for r in ("none", "full")
    ]
    equal(*results)
    assert torch.equal(results[1][1][0], torch.zeros(4, 3, dtype=torch.float64))


def test_no_layers() -> None:
    for remat in ("none", "full"):
        assert scan(block, X, [], remat=remat) is X


def test_full_remembers_less() -> None:
    """None keeps three tensors like x of each layer; full keeps one, and what a single layer needs."""
    wide = normal(4096, 6, seed=50, dtype=torch.float32)
    layers = [layer(i) for i in range(12)]
    peaks = {}
    for remat in ("none", "full"):
        with Watch() as watch:
            value_and_grad(lambda p, remat=remat: scan(block, wide, p, remat=remat).square().sum())(layers)
        peaks[remat] = watch.peak / wide.nbytes
    assert peaks["full"] < 12 + 7
    assert peaks["none"] > 3 * 12


def test_higher_derivatives() -> None:
    layers = tuple(layer(i, dtype=torch.float64) for i in range(3))
    x = normal(7, 6, seed=50)

    def loss(x: Tensor, remat: str = "none") -> Tensor:
        return scan(block, x, layers, remat=remat).square().sum()

    tangent = normal(7, 6, seed=51)
    hvp = jvp(grad(loss), (x,), (tangent,))[1]
    step = (
        1e-5  # off by step^2 times third derivatives, and rounding over step: both below 1e-7 of the largest
    )
    difference = (grad(loss)(x + step * tangent) - grad(loss)(x - step * tangent)) / (2 * step)
    assert (hvp - difference).abs().max() <= 1e-6 * hvp.abs().max()
    with pytest.raises(RuntimeError, match="remat='full' gives first derivatives only"):
        grad(lambda x: grad(loss)(x, "full").sum())(x)
    with pytest.raises(NotImplementedError, match="jvp"):
        jvp(lambda x: loss(x, "full"), (x,), (tangent,))


def test_lost_gradients_are_refused() -> None:
    """What would silently get no gradient: consts, and tensors that the block brings along."""
    w = normal(6, seed=1, dtype=torch.float32)

    def closing(w: Tensor) -> Any:
        return lambda x, layer: block(x, layer) * w

    def with_default(x: Tensor, layer: Layer, *, w: Tensor) -> Tensor:
        return block(x, layer) * w

    def total(w: Tensor, make: Any, remat: str, *consts: Any) -> Tensor:
        return scan(make(w), X, LAYERS, *(c(w) for c in consts), remat=remat).sum()

    for make in (closing, lambda w: partial(with_default, w=w), lambda w: partial(closing(w))):
        assert grad(total)(w, make, "none").abs().max() > 0
        with pytest.raises(
            ValueError, match="block must hold no tensor that requires a gradient, got one of shape"
        ):
            grad(total)(w, make, "full")
        assert torch.equal(total(w, make, "full"), total(w, make, "none"))  # a tensor without one may be held
        with pytest.raises(ValueError, match="Pass it through x or layers"):
            total(w.clone().requires_grad_(), make, "full")
    linear = torch.nn.Linear(6, 6)
    with pytest.raises(ValueError, match="block must hold no tensor"):
        scan(linear.forward, X, LAYERS, remat="full")
    for remat in ("none", "full"):
        with pytest.raises(ValueError, match="consts must hold no tensor that requires a gradient"):
            grad(total)(w, lambda _: block, remat, lambda w: w)


def test_unknown_remat() -> None:
    with pytest.raises(ValueError, match="remat='half' must be one of none, full"):
        scan(block, X, LAYERS, remat="half")


def test_a_builtin_as_a_block() -> None:
    """It has no signature to be asked for `kept`."""
    weights = [normal(6, 6, seed=i, dtype=torch.float32) for i in range(3)]
    want = X @ weights[0].T @ weights[1].T @ weights[2].T
    for remat in ("none", "full"):
        assert torch.equal(scan(F.linear, X, weights, remat=remat), want), remat


def test_layers_and_blocks_that_do_not_fit() -> None:
    """Said before any layer has run."""
    stacked, calls = {"w": torch.ones(2, 3)}, []

    def times(x: Tensor, w: Any) -> Tensor:
        calls.append(1)
        return x * w["w"]

    for layers in (stacked, stacked["w"], layer(1)):
        with pytest.raises(ValueError, match="must be a list of trees, one for each layer"):
            scan(times, torch.ones(3), layers)  # type: ignore[arg-type]
    for remat in ("attention", ("full", "attention")):
        with pytest.raises(ValueError, match="remat='attention' must go with a block that takes kept="):
            scan(times, torch.ones(3), [{"w": torch.ones(3)}] * 2, remat=remat)
    assert not calls
