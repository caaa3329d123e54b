"""The scan over parameters at rest on several ranks: what travels, when, and that gradients are right."""

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.func import grad, jvp

from tests.comm import Comm
from tests.mesh.cases import Sizes, mesh_of, shard
from tests.pool import Pool
from tests.usp.dense import normal
from usp import reduce_grads, scan, value_and_grad
from usp.arena import Arena
from usp.mesh import P, axis_sizes, coordinates, redistribute
from usp.mesh.bundle import Bundle

DEPTH, ROWS, DIM, WIDE = 4, 8, 5, 7
ALL = ("dp", "ring", "ulysses")
TREE = {"down": (WIDE, DIM), "extra": None, "scale": (DIM,), "up": (DIM, WIDE)}
SHARDED = {"down": P(None, ALL), "extra": None, "scale": P(ALL), "up": P(ALL, None)}
WHOLE = {"down": P(None, None), "extra": None, "scale": P(None), "up": P(None, None)}
KINDS = {"zero3": SHARDED, "zero0": WHOLE}
MESHES: dict[str, Sizes] = {"one axis": (1, 1, 4), "two axes": (2, 1, 2)}
Layer = dict[str, Any]

# Sums of at most 8 rows times 7 features through 4 layers, in float64: a few units of 2e-16 each, relative to
# the largest entry, over terms of mixed sign.
ROUNDING = 1e-13


def block(x: Tensor, w: Layer, kept: Any = None) -> Tensor:
    h = x @ w["up"]
    s = h.sin() if kept is None else kept.get(lambda: h.detach().sin()) - h.detach().sin() + h.sin()
    return x + w["scale"] * (s @ w["down"])


def layers_of(dtype: torch.dtype = torch.float64) -> list[Layer]:
    return [
        {
            k: None if s is None else 0.3 * normal(*s, seed=10 * i + len(k), dtype=dtype)
            for k, s in TREE.items()
        }
        for i in range(DEPTH)
    ]


def rows(mesh: Any) -> slice:
    """The rows of x that this rank works on."""
    sizes, at, index = axis_sizes(mesh), coordinates(mesh), 0
    for axis, size in sizes.items():
        index = index * size + at[axis]
    return slice(2 * index, 2 * index + 2)


def objective(x: Tensor) -> Tensor:
    return x.square().sum()


def dense_grads(dtype: torch.dtype = torch.float64) -> Any:
    """Float64, one process, a plain loop and plain autograd."""
    layers = [{k: t if t is None else t.to(dtype).double() for k, t in w.items()} for w in layers_of()]
    leaves = [t.requires_grad_() for w in layers for t in w.values() if t is not None]
    x = normal(ROWS, DIM, seed=99).to(dtype).double()
    for w in layers:
        x = block(x, w)
    return x, torch.autograd.grad(objective(x), leaves)


class Problem:
    def __init__(
        self, mesh: str, kind: str, dtype: torch.dtype | None = None, rest: Any = torch.float64
    ) -> None:
        self.mesh = mesh_of(MESHES[mesh])
        self.specs = KINDS[kind]
        srcs, dsts, shapes = ([column[n] for n in TREE] for column in (self.specs, WHOLE, TREE))
        self.bundle = Bundle(srcs, dsts, self.mesh, shapes, dtype)
        self.layers: list[Layer] = [
            {k: None if (s := self.specs[k]) is None else shard(t, s, self.mesh) for k, t in w.items()}
            for w in layers_of(rest)
        ]
        self.x = normal(ROWS, DIM, seed=99)[rows(self.mesh)].to(dtype or rest)

    def loss(self, layers: Any, **how: Any) -> Tensor:
        return objective(scan(block, self.x, layers, gather=self.bundle, **how))

    def whole(self, grads: Any) -> list[Tensor]:
        specs = [self.specs] * DEPTH
        grads = reduce_grads(grads, specs, self.mesh)
        return [
            redistribute(g, self.specs[k] or P(), WHOLE[k] or P(), self.mesh, shape=TREE[k])
            for w in grads
            for k, g in w.items()
            if g is not None
        ]


def close(got: list[Tensor], want: Any, tolerance: float) -> None:
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert (g.double() - w).abs().max() <= tolerance * w.abs().max()


def gradients(mesh: str, kind: str, how: dict[str, Any]) -> None:
    p = Problem(mesh, kind)
    if how.get("offload") == "host":
        how = {**how, "arena": Arena()}
    with Comm() as mode:
        _, grads = value_and_grad(lambda layers: p.loss(layers, **how))(p.layers)
    close(p.whole(grads), dense_grads()[1], ROUNDING)
    remat, group = how["remat"], how.get("group", 1)
    # forward, backward, and with groups the backward's forward of all but the last of each
    again = 0 if remat == "none" else DEPTH + (DEPTH - -(-DEPTH // group))
    want = {"all_gather": DEPTH + again, "reduce_scatter": DEPTH} if kind == "zero3" else {}
    assert mode.kinds() == want, (mode.kinds(), want)
    leaves = pytree.tree_map_only(Tensor, lambda t: t.clone().requires_grad_(), p.layers)
    p.loss(leaves, **how).backward()
    by_autograd = pytree.tree_map_only(Tensor, lambda t: t.grad, leaves)
    close(p.whole(by_autograd), dense_grads()[1], ROUNDING)


HOWS: list[dict[str, Any]] = [
    {"remat": "none"},
    {"remat": "full"},
    {"remat": "attention"},
    {"remat": "attention", "group": 3},
    {"remat": "full", "group": 2, "offload": "host"},
    {"remat": "attention", "offload": "host"},
]


@pytest.mark.parametrize("how", HOWS, ids=lambda h: " ".join(map(str, h.values())))
def test_gradients_and_collectives(how: dict[str, Any], ranks: Pool) -> None:
    # cases D1, H8, D44: sharded at rest, one gather a layer each way and one reduce-scatter
    ranks.run(gradients, "two axes", "zero3", how)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_and_mode(mesh: str, kind: str, ranks: Pool) -> None:
    # cases D2, D17, H10: the same gradients whether parameters are sharded or not
    ranks.run(gradients, mesh, kind, {"remat": "full"})


def master_weights() -> None:
    """float32 at rest, bfloat16 in use: the forward is bfloat16's, gradients come back float32."""
    p = Problem("two axes", "zero3", torch.bfloat16, torch.float32)
    seen = set()

    def seeing(x: Tensor, w: Layer) -> Tensor:
        seen.update(t.dtype for t in w.values() if t is not None)
        return block(x, w)

    results = []
    for remat in ("none", "full"):
        results.append(
            value_and_grad(lambda w, r=remat: objective(scan(seeing, p.x, w, gather=p.bundle, remat=r)))(
                p.layers
            )[1]
        )
    assert seen == {torch.bfloat16}
    for none, full in zip(*(pytree.tree_leaves(r) for r in results), strict=True):
        assert (none is None) == (full is None)
        if none is not None:
            assert none.dtype == full.dtype == torch.float32
            assert torch.equal(none, full)
    # a dozen operations in a row on the way through 4 layers and back, each rounded to bfloat16 by up to 2^-9
    close(p.whole(results[0]), dense_grads(torch.bfloat16)[1], 12 * 2.0**-9)


def test_master_weights(ranks: Pool) -> None:
    # cases D49, H9
    ranks.run(master_weights)


def order_of_issue() -> None:
    """Gather one ahead in both directions; gradients come back while the next layer's are computed."""
    p = Problem("one axis", "zero3")
    log: list[str] = []
    names = {id(w["up"]): i for i, w in enumerate(p.layers)}

    class Logged:
        def start(self, tensors: Any) -> Any:
            log.append(f"gather {names[id(tensors[3])]}")
            return self._wait(p.bundle.start(tensors), "use")

        def start_transpose(self, grads: Any, dtypes: Any) -> Any:
            log.append("scatter")
            return self._wait(p.bundle.start_transpose(grads, dtypes), "scattered")

        def _wait(self, pending: Any, word: str) -> Any:
            class Waits:
                def wait(self) -> Any:
                    log.append(word)
                    return pending.wait()

            return Waits()

    def block_(x: Tensor, w: Layer) -> Tensor:
        log.append("again" if torch.is_grad_enabled() else "run")
        return block(x, w)

    leaves = pytree.tree_map_only(Tensor, lambda t: t.clone().requires_grad_(), p.layers)
    names = {id(w["up"]): i for i, w in enumerate(leaves)}
    value = objective(scan(block_, p.x, leaves, gather=Logged(), remat="full"))  # type: ignore[arg-type]
    forward, log[:] = list(log), []
    value.backward()
    assert forward == [
        "gather 0", "use", "gather 1", "run", "use", "gather 2", "run", "use", "gather 3", "run", "use", "run"
    ]  # fmt: skip
    names = {}
    assert log == [
        "gather 3", "use", "gather 2", "again", "scatter",
        "use", "gather 1", "again", "scattered", "scatter",
        "use", "gather 0", "again", "scattered", "scatter",
        "use", "again", "scattered", "scatter", "scattered",
    ]  # fmt: skip


def test_order_of_issue(ranks: Pool) -> None:
    ranks.run(order_of_issue)


def frozen() -> None:
    """What is frozen is not brought back: less travels, and no gradient comes."""
    p = Problem("two axes", "zero3")
    for w in p.layers[2:]:
        w["scale"].requires_grad_()
    value = p.loss(p.layers, remat="full")
    with Comm() as mode:
        value.backward()
    assert mode.kinds() == {"all_gather": 2, "reduce_scatter": 2}
    assert all(w["up"].grad is None for w in p.layers)
    got: list[Any] = [w["scale"].grad for w in p.layers]
    assert got[:2] == [None, None]
    want = dense_grads()[1]
    for i in (2, 3):
        full = redistribute(got[i], P(ALL), P(None), p.mesh, shape=(DIM,))
        close([full], [want[3 * i + 1]], ROUNDING)


def test_frozen(ranks: Pool) -> None:
    ranks.run(frozen)


def second_order() -> None:
    """Hessian-vector product through the gather against finite differences of the gradient."""
    p = Problem("two axes", "zero3")
    ups = [w["up"] for w in p.layers]
    tangents = [normal(DIM, WIDE, seed=70 + i) for i in range(DEPTH)]
    tangents = [shard(t, P(ALL, None), p.mesh) for t in tangents]

    def slope(ups: list[Tensor]) -> Any:
        return grad(lambda us: p.loss([{**w, "up": u} for w, u in zip(p.layers, us, strict=True)]))(ups)

    hvp = jvp(slope, (ups,), (tangents,))[1]
    step = (
        1e-5  # off by step^2 times third derivatives, and rounding over step: both below 1e-7 of the largest
    )
    ahead, behind = (slope([u + s * t for u, t in zip(ups, tangents, strict=True)]) for s in (step, -step))
    largest = max(float(h.abs().max()) for h in hvp if h.numel())
    for h, a, b in zip(hvp, ahead, behind, strict=True):
        assert h.numel() == 0 or (h - (a - b) / (2 * step)).abs().max() <= 1e-6 * largest


def test_second_order(ranks: Pool) -> None:
    ranks.run(second_order)
