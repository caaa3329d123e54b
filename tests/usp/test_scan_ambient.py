"""What a re-run must see again, what must not be computed, and blocks that are compiled."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad

from tests.usp.dense import normal
from tests.usp.test_scan import CONSTS, DEPTH, LAYERS, X, block, equal
from usp import scan, value_and_grad
from usp.arena import Arena


def ways() -> list[dict[str, Any]]:
    return [
        {"remat": "full"},
        {"remat": "full", "group": 2},
        {"remat": "full", "group": 3, "offload": "host", "arena": Arena()},
    ]


@pytest.mark.parametrize("how", ways(), ids=["full", "groups", "offloaded"])
def test_random_numbers_are_drawn_again(how: dict[str, Any]) -> None:
    def noisy(x: Tensor, w: Any) -> Tensor:
        return F.dropout(block(x, w), 0.3)

    results, after = [], []
    for way in ({}, how):
        torch.manual_seed(3)
        results.append(
            value_and_grad(lambda x, p, way=way: scan(noisy, x, p, **way).square().sum(), (0, 1))(X, LAYERS)
        )
        after.append(torch.rand(3))
    equal(*results)
    equal(*after)  # and what is drawn later is as without a re-run


@pytest.mark.parametrize("how", ways(), ids=["full", "groups", "offloaded"])
def test_autocast_is_entered_again(how: dict[str, Any]) -> None:
    seen = []

    def seeing(x: Tensor, w: Any) -> Tensor:
        y = F.linear(x, w.weight)
        seen.append(y.dtype)
        return x + y

    for on, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        seen.clear()
        x = X.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            y = scan(seeing, x, LAYERS, **how).sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not on):
            y.backward()
        assert set(seen) == {dtype}
        assert len(seen) >= 2 * DEPTH


def test_frozen_leaves_cost_nothing() -> None:
    """Layers below the lowest that trains are not run again, and no gradient of a frozen leaf is computed."""
    runs: list[Tensor] = []

    def counted(x: Tensor, w: Any) -> Tensor:
        if torch.is_grad_enabled():
            runs.append(w.weight)
            assert w.bias.requires_grad == (len(runs) <= DEPTH - 2)
            assert not w.weight.requires_grad
        return block(x, w)

    layers = [w._replace(bias=w.bias.clone()) for w in LAYERS]  # type: ignore[union-attr]
    for w in layers[2:]:
        assert w.bias is not None
        w.bias.requires_grad_()
    scan(counted, X, layers, remat="full").square().sum().backward()
    assert len(runs) == DEPTH - 2
    got = [w.bias.grad for w in layers if w.bias is not None]
    assert got[:2] == [None, None]

    def by_bias(biases: list[Tensor], remat: str) -> Tensor:
        own = [w._replace(bias=b) for w, b in zip(LAYERS[2:], biases, strict=True)]
        return scan(block, X, [*LAYERS[:2], *own], remat=remat).square().sum()

    biases = [w.bias for w in LAYERS[2:] if w.bias is not None]
    want = value_and_grad(partial(by_bias, remat="none"))(biases)[1]
    equal(got[2:], want)
    equal(value_and_grad(partial(by_bias, remat="full"))(biases)[1], want)
    runs.clear()  # under torch.func too: what is no argument of the transform is frozen
    grad(lambda biases: scan(
        counted, X, [*LAYERS[:2], *(w._replace(bias=b) for w, b in zip(LAYERS[2:], biases, strict=True))],
        remat="full",
    ).square().sum())(biases)  # fmt: skip
    assert len(runs) == DEPTH - 2


def test_a_block_that_returns_its_input() -> None:
    """Also as the last layer, where the result is what was kept."""

    def identity(x: Tensor, w: Any) -> Tensor:
        return x if w["skip"] is not None else x * w["scale"]

    for skips in ((0,), (2,), (0, 1, 2), (1, 2)):
        layers = [
            {"scale": normal(3, seed=i), "skip": torch.zeros(()) if i in skips else None} for i in range(3)
        ]
        x = normal(4, 3, seed=9)
        results = [
            value_and_grad(lambda x, p, r=r: scan(identity, x, p, remat=r).square().sum(), (0, 1))(x, layers)
            for r in ("none", "full")
        ]
        equal(results[0][1][0], results[1][1][0])


def test_a_block_that_writes_its_input() -> None:
    # case D54
    def writing(x: Tensor, w: Any) -> Tensor:
        return x.mul_(2)

    with pytest.raises(ValueError, match="block must not write its input in place"):
        value_and_grad(lambda x: scan(writing, x, LAYERS, remat="full").sum())(X.clone())


def test_compiled_once_for_all_layers() -> None:
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiler = partial(torch.compile, backend=backend, fullgraph=True)
    want = value_and_grad(lambda x, p: scan(block, x, p, *CONSTS).square().sum(), (0, 1))(X, LAYERS)
    for _ in range(2):
        got = value_and_grad(
            lambda x, p: scan(block, x, p, *CONSTS, remat="full", compile=compiler).square().sum(), (0, 1)
        )(X, LAYERS)
        equal(got, want)
    assert len(graphs) == 2  # one without gradients, one with; the same for every layer and step
    with pytest.raises(ValueError, match="compile must not be given with remat='none'"):
        grad(lambda x: grad(lambda x: scan(block, x, LAYERS, compile=compiler).sum())(x).sum())(X)
    mixed = ["none"] * 2 + ["full"] * (DEPTH - 2)  # in one reverse pass "none" may be compiled
    for remat in ("none", mixed):
        got = value_and_grad(
            lambda x, p, r=remat: scan(block, x, p, *CONSTS, remat=r, compile=compiler).square().sum(), (0, 1)
        )(X, LAYERS)
        equal(got, want)
    with pytest.raises(ValueError, match="remat=2 names must go with layers"):
        scan(block, X, LAYERS, *CONSTS, remat=["none", "full"])
    assert torch.equal(scan(block, X, LAYERS, *CONSTS, compile=compiler), scan(block, X, LAYERS, *CONSTS))
