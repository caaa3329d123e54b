"""AdamW against torch's own, and norms that do not depend on where gradients live."""

import copy
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from tests.mesh.cases import Sizes, mesh_of, outside
from tests.pool import Pool
from tests.usp.dense import normal
from usp import adamw_init, adamw_update, clip_by_global_norm, global_norm, optim, reduce_grads
from usp.arena import Arena
from usp.mesh import P, coordinates, dual, local_slices, replicas

ONE = {"dp": 1, "ring": 1, "ulysses": 1}
SHAPES = {"w": (13, 6), "v": (5,), "cube": (2, 3, 4), "s": ()}
OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6}


def tree(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    leaves = {
        name: normal(*shape, seed=seed + i, dtype=dtype) for i, (name, shape) in enumerate(SHAPES.items())
    }
    return {**leaves, "none": None}


def tensors(t: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(t) if x is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_equal_torch(dtype: torch.dtype) -> None:
    params = tree(1, dtype)
    other = [p.clone().requires_grad_() for p in tensors(params)]
    groups = [  # decay on matrices alone
        {"params": [p for p in other if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in other if p.dim() <= 1], "weight_decay": 0.0},
    ]
    torch_adamw = torch.optim.AdamW(groups, fused=True, **OPTIONS)
    state = adamw_init(params)
    for step in range(5):
        grads = tree(10 * step, dtype)
        for p, g in zip(other, tensors(grads), strict=True):
            p.grad = g.clone()
        torch_adamw.step()
        params, state = adamw_update(params, grads, state, weight_decay=0.3, **OPTIONS)
    for p, q in zip(tensors(params), other, strict=True):
        assert torch.equal(p, q.detach())  # the same kernel
    for p, m, v, n in zip(other, *(tensors(t) for t in state), strict=True):
        kept = torch_adamw.state[p]
        assert torch.equal(m, kept["exp_avg"])
        assert torch.equal(v, kept["exp_avg_sq"])
        assert n.item() == 5


def test_moments_that_visit_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same updates to the bit; each moment stays in the memory it was given."""
    kept, arena = tree(1), Arena()
    visiting = copy.deepcopy(kept)
    state, away = adamw_init(kept), adamw_init(visiting, arena=arena)
    places = [t.data_ptr() for t in tensors(away.exp_avg) + tensors(away.exp_avg_sq)]
    assert arena.nbytes == 2 * sum(p.nbytes for p in tensors(kept))
    for step in range(3):
        grads = tree(10 * step)
        scale = torch.tensor(0.5)
        adamw_update(kept, copy.deepcopy(grads), state, weight_decay=0.3, grad_scale=scale, **OPTIONS)
        with monkeypatch.context() as patch:  # on a CPU no moment is away
            patch.setattr(optim, "_away", lambda leaf: True)
            adamw_update(visiting, grads, away, weight_decay=0.3, grad_scale=scale, **OPTIONS)
    for a, b in zip(tensors((kept, *state)), tensors((visiting, *away)), strict=True):
        assert torch.equal(a, b)
    assert places == [t.data_ptr() for t in tensors(away.exp_avg) + tensors(away.exp_avg_sq)]


def test_one_step_equals_the_formula() -> None:
    params, grads = tree(1, torch.float64), tree(7, torch.float64)
    before = copy.deepcopy(params)
    adamw_update(params, grads, adamw_init(params), weight_decay=0.3, **OPTIONS)
    for p, q, g in zip(tensors(params), tensors(before), tensors(grads), strict=True):
        decayed = q * (1 - 0.01 * 0.3) if q.dim() > 1 else q
        # after one step the corrected moments are the gradient and its square
        want = decayed - 0.01 * g / (g.abs() + 1e-6)
        assert torch.allclose(p, want, rtol=1e-12, atol=1e-12)  # the kernel rounds moments and roots apart


@pytest.mark.parametrize("how", ["gradient", "parameter", "both", "slice", "state"])
def test_strides_do_not_matter(how: str) -> None:
    """torch's CPU kernel reads memory in order, whatever the strides: a transposed gradient goes wrong."""

    def turned(x: Tensor) -> Tensor:
        return x.T.contiguous().T

    results = []
    for strided in (False, True):
        p, g = normal(4, 6, seed=1), normal(4, 6, seed=2)
        state = adamw_init({"w": p})
        if strided:
            g = turned(g) if how in ("gradient", "both") else g
            p = turned(p) if how in ("parameter", "both") else p
            p = torch.cat([p, p], 1)[:, :6] if how == "slice" else p
            state = adamw_init({"w": p})
            if how == "state":
                state = type(state)(
                    {"w": turned(state.exp_avg["w"])}, {"w": turned(state.exp_avg_sq["w"])}, state.steps
                )
        params: Any = {"w": p}
        for _ in range(3):
            params, state = adamw_update(params, {"w": g}, state, lr=0.1)
        assert params["w"] is p
        results.append((p, state.exp_avg["w"], state.exp_avg_sq["w"]))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_rank_may_hold_nothing_of_a_leaf() -> None:
    params = {"w": torch.empty(0, 3), "v": torch.ones(2)}
    grads = {"w": torch.empty(0, 3), "v": torch.ones(2)}
    new, state = adamw_update(params, grads, adamw_init(params), lr=0.1)
    assert new["w"].shape == (0, 3)
    assert torch.allclose(new["v"], torch.full((2,), 0.9))  # one step of lr, up to eps
    assert global_norm(grads, {"w": P(None, None), "v": P(None)}, ONE).item() == pytest.approx(2**0.5)
    assert state.steps["v"].item() == 1


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_clip_equals_torch(max_norm: float) -> None:
    grads = tree(3, torch.float64)
    specs = {name: None if g is None else P(*[None] * g.dim()) for name, g in grads.items()}
    leaves = [torch.zeros_like(g).requires_grad_() for g in tensors(grads)]
    for leaf, g in zip(leaves, tensors(grads), strict=True):
        leaf.grad = g.clone()
    want = torch.nn.utils.clip_grad_norm_(leaves, max_norm)
    clipped, norm = clip_by_global_norm(grads, specs, ONE, max_norm)
    assert torch.allclose(norm, want, rtol=1e-14)  # torch takes the norm of norms
    assert clipped["none"] is None
    for got, leaf, before in zip(tensors(clipped), leaves, tensors(grads), strict=True):
        assert torch.allclose(got, leaf.grad, rtol=1e-14)  # type: ignore[arg-type]
        assert torch.equal(got, before) == (max_norm > 1)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_norm_that_is_not_finite_shows(bad: float) -> None:
    grads = {"a": torch.tensor([1.0, bad]), "b": torch.ones(3)}
    clipped, norm = clip_by_global_norm(grads, {"a": P(None), "b": P(None)}, ONE, 1.0)
    assert not norm.isfinite()
    assert all(g.isnan().all() for g in clipped.values())  # zeros would pass for a step that was fine


def test_bfloat16_is_clipped_in_float32() -> None:
    grads = {"a": normal(64, 64, seed=1, dtype=torch.bfloat16)}
    clipped, norm = clip_by_global_norm(grads, {"a": P(None, None)}, ONE, 1.0)
    assert norm.dtype == torch.float32
    assert clipped["a"].dtype == torch.bfloat16
    want = grads["a"].float() * (1 / (norm + 1e-6))
    assert torch.equal(clipped["a"], want.bfloat16())  # rounded once, not the factor too


def test_refused() -> None:
    grads, specs = {"a": torch.ones(2)}, {"a": P(None)}
    with pytest.raises(ValueError, match="max_norm=0 must be positive"):
        clip_by_global_norm(grads, specs, ONE, 0)
    with pytest.raises(ValueError, match="at least one tensor, got none"):
        global_norm({"a": None}, {"a": None}, ONE)
    for other in ({"a": P(None), "b": P(None)}, [P(None)], {"b": P(None)}):
        with pytest.raises(ValueError, match="specs must have the structure of the tree it goes with"):
            global_norm(grads, other, ONE)
        with pytest.raises(ValueError, match="specs must have the structure"):
            reduce_grads(grads, other, ONE)
    with pytest.raises(ValueError, match="grads and state must have the structure"):
        adamw_update(grads, {"b": torch.ones(2)}, adamw_init(grads), lr=0.1)


def test_trees_pair_by_name() -> None:
    """Dicts in another order: paired by position, leaves of one shape would be exchanged in silence."""
    a, b = normal(3, 3, seed=1), normal(3, 3, seed=2)
    results = []
    for order in (("a", "b"), ("b", "a")):
        params = {"a": a.clone(), "b": b.clone()}
        grads = {name: {"a": a, "b": 5 * b}[name] for name in order}
        adamw_update(params, grads, adamw_init({name: params[name] for name in order}), lr=0.1)
        results.append(params)
    assert all(torch.equal(results[0][name], results[1][name]) for name in "ab")


EVERYWHERE = ("dp", "ring", "ulysses")
LAYOUTS: dict[str, dict[str, P | None]] = {
    "sharded": {"w": P(EVERYWHERE, None), "v": P(EVERYWHERE), "cube": P(None, EVERYWHERE, None), "s": P()},
    "replicated": {"w": P(None, None), "v": P(None), "cube": P(None, None, None), "s": P()},
    "mixed": {"w": P("ulysses", "dp"), "v": P(None), "cube": P(None, "ulysses", None), "s": P()},
}


def on_ranks(sizes: Sizes) -> list[tuple[Tensor, Tensor]]:
    """Norm, and the norm after clipping, of whole gradients cut to each layout."""
    mesh = mesh_of(sizes)
    if outside(mesh):
        return []
    full, results = tree(3, torch.float64), []
    for placed in LAYOUTS.values():
        specs = {**placed, "none": None}
        summands: dict[str, Any] = {"none": None}
        for name, spec in placed.items():
            assert spec is not None
            whole = full[name][local_slices(spec, SHAPES[name], mesh)]
            # contributions of the ranks that hold copies: only their sum is the gradient
            first = all(coordinates(mesh)[a] == 0 for a in dual(spec, mesh).partial)
            count = replicas(spec, mesh)
            summands[name] = whole - 3.0 * (count - 1) if first else torch.full_like(whole, 3.0)
        grads = reduce_grads(summands, specs, mesh)
        assert grads["none"] is None
        for name, spec in placed.items():
            want = full[name][local_slices(spec, SHAPES[name], mesh)]  # type: ignore[arg-type]
            assert torch.allclose(grads[name], want, rtol=0, atol=1e-14), name  # 3.0 was taken away and added
        clipped, norm = clip_by_global_norm(grads, specs, mesh, 0.5)
        results.append((norm, global_norm(clipped, specs, mesh)))
    return results


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 2), (2, 1, 2), (1, 1, 4), (1, 1, 3), (1, 2, 2)], ids=str)
def test_norm_on_any_mesh(sizes: Sizes, ranks: Pool) -> None:
    # cases H10, D1, D2, D17, H12
    want = torch.cat([t.flatten() for t in tensors(tree(3, torch.float64))]).norm()
    by_rank = [r for r in ranks.run(on_ranks, sizes) if r]
    assert len(by_rank) == sizes[0] * sizes[1] * sizes[2]
    for i, layout in enumerate(LAYOUTS):
        for results in by_rank:
            norm, after = results[i]
            assert abs(norm - want) <= 1e-14 * want, layout  # 108 squares in another order
            assert abs(after - 0.5) <= 1e-6, layout  # torch's 1e-6 in the denominator
            assert norm == by_rank[0][i][0], layout  # the very same number everywhere


def bfloat16_sum() -> None:
    mesh = mesh_of((1, 1, 4))
    part = torch.full((3,), 1.0 if mesh.get_coordinate()[2] == 1 else 2.0**-9, dtype=torch.bfloat16)  # type: ignore[index]
    (total,) = reduce_grads([part], [P(None)], mesh)
    assert torch.equal(total, torch.full((3,), 1 + 3 * 2.0**-9).bfloat16())
    assert total[0] > 1  # one by one in bfloat16 they would be lost


def test_replicas_are_summed_in_float32(ranks: Pool) -> None:
    # cases H9, H13, P18
    ranks.run(bfloat16_sum)


def test_a_scale_on_the_way_in_is_a_scaled_gradient() -> None:
    grads = {"w": normal(3, 4, seed=1, dtype=torch.float32), "b": normal(5, seed=2, dtype=torch.float32)}
    params = {"w": normal(3, 4, seed=3, dtype=torch.float32), "b": normal(5, seed=4, dtype=torch.float32)}
    scale = torch.tensor(0.25)  # a power of two, so that its inverse and the products are exact
    results = []
    for given, factor in (({k: g * scale for k, g in grads.items()}, None), (grads, scale)):
        mine = {k: p.clone() for k, p in params.items()}
        state = adamw_init(mine)
        for _ in range(2):
            own = {k: g.clone() for k, g in given.items()}
            adamw_update(mine, own, state, lr=0.1, weight_decay=0.1, grad_scale=factor)
        results.append(mine)
    for name in params:
        assert torch.equal(results[0][name], results[1][name])
        assert not torch.equal(results[0][name], params[name])


@pytest.mark.parametrize("moments", ["device", "host"])
def test_a_gradient_that_two_parameters_share_is_scaled_once(moments: str) -> None:
    """Parameters that are added get the same gradient, in one memory, of which one may see other sizes."""
    grads = [normal(3, 4, seed=1)]
    grads += [grads[0], grads[0].view(12), grads[0].view(2, 6), grads[0][1:]]
    params = [normal(*g.shape, seed=i) for i, g in enumerate(grads)]
    found = []
    for given in ([g.clone() for g in grads], grads):
        own = [p.clone() for p in params]
        state = adamw_init(own, arena=Arena() if moments == "host" else None)
        adamw_update(own, given, state, grad_scale=torch.tensor(0.1, dtype=grads[0].dtype), **OPTIONS)
        found.append(tensors([own, state.exp_avg]))
    for alone, together in zip(*found, strict=True):
        assert torch.equal(alone, together)
