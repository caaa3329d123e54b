"""What chunks of heads are made of: projections by tiles of tokens, and when exchanges start and end."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.mesh.cases import mesh_of
from tests.pool import Pool
from tests.usp.dense import normal
from tests.usp.test_head_chunks import (
    MAKE,
    D,
    E,
    H,
    by_chunks,
    norm,
    projected,
    turn_k,
    turn_q,
    views,
    weights,
)
from usp.head_chunks import Projections
from usp.head_chunks.project import LEAST, Gradients, Pieces, num_tiles, tiles, write

HEADS = (8, 4)
Q, KV = [(0, 2), (4, 5)], [(1, 2), (2, 4)]


@pytest.mark.parametrize("length", [0, 1, 5, LEAST, LEAST + 1, 20 * LEAST + 3])
def test_tiles_cover_every_token_once(length: int) -> None:
    parts = list(tiles(length))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(length))
    assert len(parts) <= num_tiles(length)


def test_projected_and_back_by_tiles() -> None:
    """Three tiles of two rows, heads of two ranks: as one product with autograd."""
    length = 2 * LEAST + 5
    w = [t.requires_grad_() for t in weights(HEADS)]
    x = normal(2, length, D, seed=7).requires_grad_()
    counts = {"q": [b - a for a, b in Q], "k": [b - a for a, b in KV], "v": [b - a for a, b in KV]}
    out = Pieces(*([torch.empty(2, length, n, H).double() for n in ns] for ns in counts.values()))
    with torch.no_grad():
        write(MAKE, x, w, Q, KV, out)

    h, whole = norm(x, w), slice(0, length)
    all_q = turn_q(projected(h, w[0], HEADS[0]), w, whole)
    all_k, all_v = turn_k(projected(h, w[1], HEADS[1]), w, whole), projected(h, w[2], HEADS[1])
    want = [t[:, :, a:b] for t, ranges in ((all_q, Q), (all_k, KV), (all_v, KV)) for a, b in ranges]
    got = [t for ts in out for t in ts]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)  # sums of 6 terms

    ups = [normal(*t.shape, seed=i) for i, t in enumerate(got)]
    grads = Gradients(MAKE, x.detach(), [t.detach() for t in w], pytree.tree_structure(w))
    with torch.no_grad():
        grads.add(Q, KV, Pieces(ups[:2], ups[2:4], ups[4:]))
        dx, d_weights = grads.result()
    expected = torch.autograd.grad(want, [x, *w], ups, materialize_grads=True)
    for one, other in zip([dx, *d_weights], expected, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-10)  # sums over 8197 tokens


def as_it_is(y: Tensor, w: list[Tensor], tokens: slice) -> Tensor:
    return y


def test_gradient_of_x_is_rounded_once_a_chunk() -> None:
    """In bfloat16, with 8 chunks of q, k and v: by half a unit of the last place each."""
    length, num_heads = 64, 8
    w = [normal(num_heads * H, D, seed=i).bfloat16() for i in range(3)]
    x = normal(1, length, D, seed=7).bfloat16()
    make = Projections(None, views, as_it_is, as_it_is, reads=False)
    grads = Gradients(make, x, w, pytree.tree_structure(w))
    ups = [normal(1, length, num_heads, H, seed=9 + i).bfloat16() for i in range(3)]
    for c in range(num_heads):
        own = [[t[:, :, c : c + 1]] for t in ups]
        with torch.no_grad():
            grads.add([(c, c + 1)], [(c, c + 1)], Pieces(*own))
    exact = torch.stack([t.double().flatten(2) @ m.double() for t, m in zip(ups, w, strict=True)]).sum(0)
    error = (grads.result()[0].double() - exact).abs().max() / exact.abs().max()
    assert error <= num_heads * 2**-9  # of sums no larger than the last


class Exchanges(TorchDispatchMode):
    """Exchanges as they are started "+" and waited for "-", and attention "*" between them."""

    def __init__(self) -> None:
        super().__init__()
        self.said = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        signs = {
            "all_to_all_single": "+",
            "wait_tensor": "-",
            "exp_": "*",
        }  # softmax alone takes exponentials
        self.said += signs.get(str(func).split(".")[1], "")
        return func(*args, **(kwargs or {}))

    def seen(self) -> str:
        return re.sub(r"\*+", "*", self.said)


def exchanges() -> tuple[str, str]:
    mesh = mesh_of((1, 1, 4))
    heads = (16, 8)  # 4 and 2 of a rank: kv heads come with the first and third chunk of four
    w = [t.requires_grad_() for t in weights(heads)]
    x = normal(2, 3, D, seed=7).requires_grad_()
    with Exchanges() as forward:
        out = by_chunks(x, w, 4, 12, mesh, heads)
    with Exchanges() as backward:
        out.backward(normal(2, 3, E, seed=8))
    return forward.seen(), backward.seen()


def test_exchanges_run_beside_attention(ranks: Pool) -> None:
    """Of two chunks at most: the next one's, and the last one's result or gradients."""
    for forward, backward in ranks.run(exchanges):
        # q (and kv) come; the next is started; attention; the last result is there; this one is sent
        assert forward == "++" + "--+*+" + "-++*-+" + "--+*-+" + "-*-+" + "-"
        # do, q (and kv) come; the next is started; attention; gradients of the last are there; these are sent
        assert backward == "+++" + "---++*+" + "--+++*-++" + "---++*--+" + "--*-++" + "--"
