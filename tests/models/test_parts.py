"""Compiled parts of a layer: no number of lengths, runs and configurations is too many for torch.compile."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.test_options import CFG
from usp.models import parts

SIZE = CFG.hidden_size


def test_programs_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process: more than 8 kinds of runs of a norm, each of which wants a program of its own."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.manual_seed(0)
    weight = torch.randn(SIZE)
    for eps in (1e-2, 1e-3, 1e-4, 1e-5):
        cfg = replace(CFG, rms_eps=eps)
        norm = parts.local_parts(cfg, compiled=True).norm
        for length in (7, 11, 13):
            whole = torch.randn(2, 2 * length, SIZE)
            wanting = whole.clone().requires_grad_()
            want = parts.rms_norm(whole, weight, eps=eps)
            for x in (whole, wanting):
                for grad in (False, True):
                    with torch.set_grad_enabled(grad):
                        assert torch.equal(norm(x, weight), want)
                        assert torch.equal(norm(x[:, length:], weight), want[:, length:])
                        assert torch.equal(norm(x.transpose(0, 1), weight), want.transpose(0, 1))
                        assert norm(x, weight).requires_grad == (grad and x is wanting)
    parts.local_parts.cache_clear()


@pytest.mark.parametrize("frozen", [0, 1, 2, None])
@pytest.mark.parametrize("name", ["parts", "unread"])
def test_what_is_frozen_gets_no_gradient(name: str, frozen: int | None) -> None:
    """And changes none of the others, whose values are those of plain operations."""
    torch.manual_seed(0)
    shapes = (2, 3, 8), (2, 3, 4, 5), (8, 20)
    given = [
        torch.randn(shape, dtype=torch.float64, requires_grad=i != frozen) for i, shape in enumerate(shapes)
    ]
    x, y, weight = given
    if name == "parts":
        found = parts.add_linear_of_parts(x, y, weight, None)
    else:
        found = parts.add_linear(x, y.flatten(2), weight, None, value=False)
    asked, up = [t for t in given if t.requires_grad], torch.randn(shapes[0], dtype=torch.float64)
    dense = x + y.flatten(2) @ weight.T
    products: list[str] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "mm" in func._overloadpacket.__name__:
                products.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Products():
        got = torch.autograd.grad(found, asked, up)
    assert len(products) == (1 if frozen == 2 else 2)  # y's gradient is worked out in any case
    for one, other in zip(got, torch.autograd.grad(dense, asked, up), strict=True):
        torch.testing.assert_close(one, other)
