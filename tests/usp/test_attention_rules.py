"""Attention under torch.func and torch.compile, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

from tests.usp.dense import Watch, dense_attention, normal
from tests.usp.test_attention import CASES, cu, inputs, row_edges
from usp import Batch, attention, shard_batch
from usp.mesh import TABLES

PACKED = CASES["packed"]
X = inputs(PACKED)
EVERY = (0, 1, 2)
WEIGHT = normal(*X[0].shape, seed=9)
# float64 rounding of the same sums, in another order, relative to entries of size 1 to 10
ROUNDING = 1e-12


def close(got: Tensor, want: Tensor, tolerance: float = ROUNDING) -> bool:
    return got.shape == want.shape and bool(
        (got - want).abs().max() <= tolerance * max(1.0, float(want.abs().max()))
    )


def energy(q: Tensor, k: Tensor, v: Tensor, kernel: str = "auto") -> Tensor:
    out = attention(q, k, v, cu_seqlens=cu(PACKED), kernel=kernel)
    return (out**2 * WEIGHT).sum()


def dense_energy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = dense_attention(q, k, v, edges=row_edges(PACKED))
    return (out**2 * WEIGHT).sum()


def test_second_derivatives_of_the_reference() -> None:
    tangent = (normal(*X[0].shape, seed=20), *(normal(*X[1].shape, seed=20 + i) for i in (1, 2)))

    def slope(*x: Any) -> tuple[Tensor, ...]:
        return grad(lambda q, k, v: energy(q, k, v, kernel="reference"), argnums=EVERY)(*x)

    hvp = jvp(slope, X, tangent)[1]
    step = 1e-5
    up, down = (slope(*(x + sign * step * t for x, t in zip(X, tangent, strict=True))) for sign in (1, -1))
    reverse = vjp(slope, *X)[1](tangent)
    exact = jvp(grad(dense_energy, argnums=EVERY), X, tangent)[1]
    for h, r, e, u, d in zip(hvp, reverse, exact, up, down, strict=True):
        # a central difference is off by step^2 times third derivatives and rounding over step, about 1e-10
        assert close(h, (u - d) / (2 * step), 1e-8)
        assert close(r, h)  # the Hessian is symmetric
        assert close(h, e)
    small = tuple(t[:, :2, :1, :2] for t in X)
    full = hessian(lambda q: attention(q, *small[1:], kernel="reference").pow(2).sum())(small[0])
    ends = list(range(0, 2 * 2 + 1, 2))
    assert close(full, hessian(lambda q: dense_attention(q, *small[1:], edges=ends).pow(2).sum())(small[0]))


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_first_derivatives_by_transform(kernel: str) -> None:
    want = grad(dense_energy, argnums=EVERY)(*X)
    by_grad = grad(energy, argnums=EVERY)(*X, kernel)
    value, pull = vjp(lambda q, k, v: energy(q, k, v, kernel), *X)[:2]
    by_vjp = pull(torch.ones_like(value))
    assert all(close(a, w) and close(b, w) for a, b, w in zip(by_grad, by_vjp, want, strict=True))


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_vmap_equals_a_loop(kernel: str) -> None:
    stacks = tuple(torch.stack([t, 2 * t, t - 1], 1) for t in X)
    loop = [tuple(t.select(1, i) for t in stacks) for i in range(3)]

    def run(*x: Tensor) -> Tensor:
        return attention(*x, cu_seqlens=cu(PACKED), kernel=kernel)

    assert close(vmap(run, in_dims=1)(*stacks), torch.stack([run(*x) for x in loop]))
    only_k = vmap(run, in_dims=(None, 1, None))(X[0], stacks[1], X[2])
    assert close(only_k[1], run(X[0], loop[1][1], X[2]))
    nested = vmap(vmap(run))(*(torch.stack([t.movedim(1, 0), -t.movedim(1, 0)]) for t in stacks))
    assert close(nested[1, 2], run(*(-t for t in loop[2])))

    def slope(*x: Any) -> tuple[Tensor, ...]:
        return grad(lambda q, k, v: energy(q, k, v, kernel=kernel), argnums=EVERY)(*x)

    per_sample = vmap(slope, in_dims=1)(*stacks)
    for got, want in zip(per_sample, zip(*(slope(*x) for x in loop), strict=True), strict=True):
        assert close(got, torch.stack(want))

    def per(q: Any, k: Any, v: Any) -> Tensor:
        return energy(q, k, v, kernel)

    def total(*y: Any) -> Tensor:
        return vmap(per, in_dims=1)(*y).sum()

    summed = grad(total, argnums=EVERY)(*stacks)
    assert all(close(s.movedim(1, 0), p) for s, p in zip(summed, per_sample, strict=True))
    # many cotangents for one forward
    rows = jacrev(lambda q: run(q, *X[1:]).sum((0, 1, 3)))(X[0])
    by_hand = [grad(lambda q, n=n: run(q, *X[1:]).sum((0, 1, 3))[n])(X[0]) for n in range(len(rows))]
    assert close(rows, torch.stack(by_hand))
    both = vmap(jacrev(lambda q: run(q, *X[1:]).sum((0, 1, 3))), in_dims=1)(stacks[0])
    assert close(both[0], rows)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_compiled_in_one_graph(kernel: str) -> None:
    # case D61. Whole rows only: boundaries read from a tensor are data, which one graph cannot hold.
    def loss(*x: Tensor) -> Tensor:
        return (attention(*x, kernel=kernel) ** 2 * WEIGHT).sum()

    want = grad(loss, argnums=EVERY)(*X)
    leaves = [t.clone().requires_grad_() for t in X]
    by_autograd = torch.autograd.grad(
        torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), leaves
    )
    by_func = torch.compile(grad(loss, argnums=EVERY), fullgraph=True, backend="aot_eager")(*X)
    assert all(close(a, w) and close(f, w) for a, f, w in zip(by_autograd, by_func, want, strict=True))


def test_backward_makes_no_zeros_for_what_has_no_gradient() -> None:
    q = X[0].clone().requires_grad_()
    out = attention(q, *X[1:], kernel="cpu")
    with Watch() as watch:
        torch.autograd.grad(out, q, WEIGHT)
    assert not [op for op in watch.ops if "zeros" in op]


def test_kernels_say_that_they_have_first_derivatives_only() -> None:
    q = X[0].clone().requires_grad_()
    (first,) = torch.autograd.grad(energy(q, *X[1:], kernel="cpu"), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"first derivatives only.*reference"):
        first.sum().backward()
    with pytest.raises(RuntimeError, match=r"first derivatives only.*reference"):
        grad(lambda q: grad(energy)(q, *X[1:], "cpu").sum())(X[0])
    with pytest.raises(NotImplementedError, match="jvp"):
        jvp(lambda q: energy(q, *X[1:], kernel="cpu"), (X[0],), (X[0],))


@pytest.mark.parametrize(
    ("dtype", "kernel", "message"),
    [
        (torch.float32, "cudnn", "kernel='cudnn' must take device cpu, torch.float32, packed"),
        (torch.bfloat16, "flash", "Use one of: cpu, tiled, reference, auto"),
        (torch.float16, "cpu", "must take torch.float16, and does not. Use one of: tiled, reference, auto"),
        (torch.float64, "none", "kernel='none'"),
    ],
)
def test_kernels_refuse(dtype: torch.dtype, kernel: str, message: str) -> None:
    # case P48
    with pytest.raises(ValueError, match=message):
        attention(*inputs(PACKED, dtype), cu_seqlens=cu(PACKED), kernel=kernel)


@pytest.mark.parametrize(
    "edges",
    [[0, 14, 28], [0, 3, 4, 9, 14], [0, 7], [1, 7, 14], [0, 7, 7, 14], [0, 9, 7, 14], [], [0]],
    ids=["too long", "across a row's end", "too short", "late", "empty document", "falling", "none", "one"],
)
def test_boundaries_refused(edges: list[int]) -> None:
    # case H34: a document that runs on into the next row would attend across the batch
    with pytest.raises(
        ValueError, match=r"must rise from 0 to B . S through the end of every row, got B=2, S=7"
    ):
        attention(*X, cu_seqlens=torch.tensor(edges, dtype=torch.int32))


def test_boundaries_on_a_device_refused() -> None:
    with pytest.raises(ValueError, match="cu_seqlens must be on the CPU"):
        attention(*X, cu_seqlens=torch.empty(3, dtype=torch.int32, device="meta"))


def test_shapes_refused() -> None:
    q, k, v = X
    for bad in (
        (q, k, v[:, :, :1]),
        (q[:, :, :5], k, v),
        (q, k[:, :3], v[:, :3]),
        (q, k[..., :4], v[..., :4]),
    ):
        with pytest.raises(ValueError, match="N a multiple of K"):
            attention(*bad)
    with pytest.raises(ValueError, match="N a multiple of K"):
        attention(q, k[:, :, :0], v[:, :, :0])
    with pytest.raises(ValueError, match="N a multiple of K"):
        attention(q[0], k[0], v[0])


def edges_of(kind: torch.dtype) -> Tensor:
    return torch.tensor([0, 7, 14], dtype=kind)


KINDS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "k=torch.float32 on cpu must be of the type of q": ((X[0], X[1].float(), X[2]), {}),
    "v=torch.bfloat16 on cpu must be of the type of q": ((X[0], X[1], X[2].bfloat16()), {}),
    "k=torch.float64 on meta must be of the type of q and on its device": ((X[0], X[1].to("meta"), X[2]), {}),
    "q=torch.int64 must be a tensor of floating point": (tuple(t.long() for t in X), {}),
    "v=list must be a tensor of floating point": ((*X[:2], X[2].tolist()), {}),
    "q=.0, .* must have B, S and H of at least 1": (tuple(t[:0] for t in X), {}),
    "q=.2, 0, .* must have B, S and H of at least 1": (tuple(t[:, :0] for t in X), {}),
    "q=.2, 7, ., 0. must have B, S and H of at least 1": (tuple(t[..., :0] for t in X), {}),
    "sinks=torch.int64 must be a tensor of floating": (X, {"sinks": torch.zeros(6, dtype=torch.int64)}),
    "sinks=torch.float32 on meta must be": (X, {"sinks": torch.zeros(6, device="meta")}),
    "cu_seqlens=.3,. torch.float64 must be whole numbers": (X, {"cu_seqlens": edges_of(torch.float64)}),
    "cu_seqlens=.3,. torch.bool must be whole numbers": (X, {"cu_seqlens": edges_of(torch.bool)}),
    "cu_seqlens=.1, 3. torch.int32 must be": (X, {"cu_seqlens": edges_of(torch.int32)[None]}),
    "cu_seqlens=list must be whole numbers": (X, {"cu_seqlens": [0, 7, 14]}),
    "window=2.5 must be a whole number": (X, {"window": 2.5}),
    "window=True must be a whole number": (X, {"window": True}),
    "softcap=nan must be a number above 0": (X, {"softcap": float("nan")}),
    "softcap=2.0 must be a number above 0": (X, {"softcap": torch.tensor(2.0)}),
    "scale=nan must be a finite number": (X, {"scale": float("nan")}),
    "scale=half must be a finite number": (X, {"scale": "half"}),
}


@pytest.mark.parametrize("message", KINDS)
def test_odd_kinds_refused(message: str) -> None:
    args, options = KINDS[message]
    with pytest.raises(ValueError, match=message):
        attention(*args, **options)


def test_long_boundaries_and_other_sinks() -> None:
    """int64 boundaries are taken as int32 ones; sinks may be of another type than q."""
    edges = torch.tensor(row_edges(PACKED))
    assert torch.equal(attention(*X, cu_seqlens=edges), attention(*X, cu_seqlens=edges.int()))
    sinks = torch.zeros(6)
    assert torch.equal(attention(*X, sinks=sinks), attention(*X, sinks=sinks.double()))


def test_more_documents_than_a_launch_takes() -> None:  # case H57
    q = torch.zeros(1, 65536, 1, 2)
    with pytest.raises(ValueError, match="cu_seqlens must hold at most 65535 documents"):
        attention(q, q, q, cu_seqlens=torch.arange(65537, dtype=torch.int32))
    # a batch of which one rank has too many is refused by all of them, when it is cut
    rows = torch.zeros(2, 65536, dtype=torch.int64)
    batch = Batch(rows, cu_seqlens=[[0, 65536], range(65537)])
    with pytest.raises(ValueError, match="cu_seqlens must hold at most 65535 documents for one rank"):
        shard_batch(batch, table=TABLES["usp"], mesh={"dp": 2, "ring": 1, "ulysses": 1}, device="cpu")
