"""The compiled pass of AdamW: torch's numbers in one loop over memory, compiled once."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.optim.adamw import adamw as functional_adamw

from tests.usp.dense import normal
from usp import adamw, adamw_init, adamw_update, optim
from usp.adamw import LARGE, WIDTH, Leaf, suits, update_large
from usp.arena import Arena

SIZES = (16 * 1001, 32, 16 * 77, 16 * 4096)
BETAS, EPS, DECAY = (0.8, 0.95), 1e-6, 0.3
RATES = (0.01, 0.02, 0.005, 0.03, 0.001)
FIXED: dict[str, Any] = {"betas": BETAS, "eps": EPS, "weight_decay": DECAY}


def leaves_of(dtype: torch.dtype, sizes: tuple[int, ...] = SIZES) -> list[Leaf]:
    params = [normal(n, seed=n, dtype=dtype) for n in sizes]
    return [Leaf(p, p, torch.zeros_like(p), torch.zeros_like(p), torch.zeros(())) for p in params]


def gradients(step: int, dtype: torch.dtype) -> list[Tensor]:
    return [normal(n, seed=1000 * step + n, dtype=dtype) for n in SIZES]


def by_torch(dtype: torch.dtype, given: torch.dtype, scale: float) -> list[Leaf]:
    """The same steps by torch's kernel, in `dtype`, from parameters and gradients that were in `given`."""
    params = [leaf.p.to(dtype).requires_grad_() for leaf in leaves_of(given)]
    theirs = torch.optim.AdamW(params, lr=1.0, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
    for step, rate in enumerate(RATES):
        theirs.param_groups[0]["lr"] = rate
        for p, g in zip(params, gradients(step, given), strict=True):
            p.grad = g.to(dtype) * scale
        theirs.step()
    states = [theirs.state[p] for p in params]
    return [
        Leaf(p.detach(), p, s["exp_avg"], s["exp_avg_sq"], s["step"])
        for p, s in zip(params, states, strict=True)
    ]


def compiled_steps(dtype: torch.dtype, scale: float) -> list[Leaf]:
    """By the compiled pass; nothing is compiled after the first leaf's first step."""
    leaves = leaves_of(dtype)
    before, after = graphs(), 0
    for step, rate in enumerate(RATES):
        now = [leaf._replace(grad=g) for leaf, g in zip(leaves, gradients(step, dtype), strict=True)]
        update_large(now, lr=rate, grad_scale=torch.tensor(scale), **FIXED)
        after = after or graphs()
        for leaf, g in zip(now, gradients(step, dtype), strict=True):
            assert torch.equal(leaf.grad, g)  # only read
    assert graphs() == after <= before + 1
    return leaves


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def worst(leaves: list[Leaf], exact: list[Leaf]) -> list[float]:
    """Of parameters and both moments: the largest error, as a share of the largest entry."""
    out = []
    for place in (0, 2, 3):
        pairs = [(leaf[place].double(), want[place]) for leaf, want in zip(leaves, exact, strict=True)]
        out.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    return out


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_of_a_changing_rate(dtype: torch.dtype, scale: float) -> None:
    exact = by_torch(torch.float64, dtype, float(torch.tensor(scale)))
    got = compiled_steps(dtype, scale)
    assert all(leaf.steps.item() == len(RATES) for leaf in got)
    for error in worst(got, exact):  # five steps, each rounding a sum twice
        assert error <= 2 * len(RATES) * torch.finfo(dtype).eps / 2


def test_as_near_as_the_kernel_of_torch() -> None:
    exact = by_torch(torch.float64, torch.float32, 1.0)
    ours = worst(compiled_steps(torch.float32, 1.0), exact)
    theirs = worst(by_torch(torch.float32, torch.float32, 1.0), exact)
    for a, b in zip(ours, theirs, strict=True):
        assert a <= 1.5 * b


def test_a_small_decay_is_not_rounded_away() -> None:
    """As a factor near 1 it would be wrong by a hundredth in float32, in the same direction every step."""
    (leaf,) = leaves_of(torch.float32, (16 * 1001,))
    leaf, before, steps = leaf._replace(grad=torch.zeros_like(leaf.p)), leaf.p.double(), 200
    options: dict[str, Any] = {**FIXED, "weight_decay": 1e-3}
    for _ in range(steps):
        update_large([leaf], lr=1e-3, grad_scale=None, **options)
    lost = 1 - (leaf.p.double() / before).mean().item()
    assert lost == pytest.approx(1 - (1 - 1e-6) ** steps, rel=2e-3)


@pytest.mark.parametrize("betas", [(0.9, 0.0), (0.9, 1e-4), (0.0, 0.95)], ids=str)
def test_means_that_hardly_remember(betas: tuple[float, float]) -> None:
    """A square much larger than the one before must not swallow it: torch's numbers in float64."""
    leaves = leaves_of(torch.float32)
    exact = [leaf.p.double().requires_grad_() for leaf in leaves]
    theirs = torch.optim.AdamW(exact, lr=0.01, betas=betas, eps=EPS, weight_decay=DECAY)
    for step in range(3):
        grads = [g * 10.0 ** (2 - 2 * step) for g in gradients(step, torch.float32)]
        for p, g in zip(exact, grads, strict=True):
            p.grad = g.double()
        theirs.step()
        now = [leaf._replace(grad=g) for leaf, g in zip(leaves, grads, strict=True)]
        update_large(now, lr=0.01, grad_scale=None, betas=betas, eps=EPS, weight_decay=DECAY)
    for leaf, want in zip(leaves, exact, strict=True):
        # float32 rounds p by 2^-24 of the largest, and an update of up to some hundred times lr likewise
        assert (leaf.p.double() - want.detach()).abs().max() < 3e-6 * want.detach().abs().max()


def test_bfloat16_is_rounded_once() -> None:
    """All three results: computed in float32 from what was stored."""
    (leaf,) = leaves_of(torch.bfloat16, (16 * 1001,))
    m, v, grad = (normal(leaf.p.numel(), seed=seed, dtype=torch.bfloat16) for seed in (1, 2, 3))
    leaf = Leaf(leaf.p, grad, m, v.square(), torch.tensor(4.0))
    wide = [t.double() for t in leaf[:4]]
    step = [torch.tensor(4.0)]
    functional_adamw(
        [wide[0]], [wide[1]], [wide[2]], [wide[3]], [], step, foreach=False, amsgrad=False, maximize=False,
        beta1=BETAS[0], beta2=BETAS[1], lr=0.01, eps=EPS, weight_decay=DECAY,
    )  # fmt: skip
    update_large([leaf], lr=0.01, grad_scale=None, **FIXED)
    for place in (0, 2, 3):
        off, half = (leaf[place].double() - wide[place]).abs(), 2.0**-8 * wide[place].abs()
        assert (off <= half + 1e-6).all()  # half a digit, and float32's own, of sums that may cancel
        assert (leaf[place] == wide[place].bfloat16()).double().mean() > 0.999


def test_pieces_of_a_leaf_too_long_for_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for rows in (adamw.ROWS, 100, 7):
        monkeypatch.setattr(adamw, "ROWS", rows)
        leaves = leaves_of(torch.float32, (16 * 1001,))
        for step in range(2):
            grad = normal(16 * 1001, seed=step, dtype=torch.float32)
            update_large([leaves[0]._replace(grad=grad)], lr=0.1, grad_scale=None, **FIXED)
        assert len(adamw._pieces(leaves[0].p)) == -(-1001 // rows)
        results.append(leaves[0])
    for other in results[1:]:
        assert all(torch.equal(other[place], results[0][place]) for place in (0, 2, 3))
    assert adamw.ROWS * WIDTH < 2**31


def allocated(work: Callable[[], Any]) -> int:
    """Bytes of the largest operator's own allocations."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    return max(event.self_cpu_memory_usage for event in profile.events() or [])


def test_no_memory_of_the_size_of_a_leaf() -> None:
    (leaf,) = leaves_of(torch.float32, (16 * 4096,))
    factors = torch.rand(12)
    arguments = (leaf.p, normal(16 * 4096, seed=1, dtype=torch.float32), leaf.m, leaf.v, factors)
    assert allocated(lambda: adamw.one_pass(*arguments)) >= leaf.p.nbytes  # it shows where there is any
    update_large([leaf], lr=0.1, grad_scale=None, **FIXED)
    assert allocated(lambda: update_large([leaf], lr=0.1, grad_scale=None, **FIXED)) < leaf.p.nbytes / 100


@pytest.fixture(scope="module")
def trees() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and gradients: a large leaf among others that the compiled pass is not for."""
    shapes = {"large": (1 << 11, LARGE >> 11), "small": (5, 6), "ragged": (LARGE + 1, 1), "vector": (7,)}
    params = {name: normal(*s, seed=len(name), dtype=torch.float32) for name, s in shapes.items()}
    return params, {name: normal(*p.shape, seed=9, dtype=p.dtype) for name, p in params.items()}


def test_only_large_leaves_and_only_where_wanted(trees: Any) -> None:
    """A gradient is only read by the compiled pass, and written over by torch's kernel."""
    scale, results = torch.tensor(0.5), []
    for compiled, read in ((None, False), (False, False), (True, True)):
        params, grads = copy.deepcopy(trees)
        state, before = adamw_init(params), graphs()
        adamw_update(params, grads, state, lr=0.1, weight_decay=DECAY, grad_scale=scale, compiled=compiled)
        assert torch.equal(grads["large"], trees[1]["large"]) == read
        assert torch.equal(grads["ragged"], 0.5 * trees[1]["ragged"])
        assert read or graphs() == before
        assert all(n.item() == 1 for n in state.steps.values())
        results.append((params, state))
    (a, kept_a), (b, kept_b) = results[1:]
    for name in a:
        for one, other in ((a, b), (kept_a.exp_avg, kept_b.exp_avg), (kept_a.exp_avg_sq, kept_b.exp_avg_sq)):
            assert name == "large" or torch.equal(one[name], other[name])
            assert (one[name] - other[name]).abs().max() <= 1e-6 * one[name].abs().max()


def test_moments_that_visit_from_the_host(trees: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, grads = copy.deepcopy(trees)
    visiting, arena = copy.deepcopy(kept), Arena()
    state, away = adamw_init(kept), adamw_init(visiting, arena=arena)
    for rate in RATES[:2]:
        options: dict[str, Any] = {"lr": rate, "weight_decay": DECAY, "compiled": True}
        adamw_update(kept, copy.deepcopy(grads), state, **options)
        with monkeypatch.context() as patch:  # on a CPU no moment is away
            patch.setattr(optim, "_away", lambda leaf: True)
            adamw_update(visiting, grads, away, **options)
    for name in kept:
        assert torch.equal(kept[name], visiting[name])
        assert torch.equal(state.exp_avg[name], away.exp_avg[name])
        assert torch.equal(state.exp_avg_sq[name], away.exp_avg_sq[name])


def test_what_suits() -> None:
    large = torch.zeros(2 * LARGE + 1)
    whole = large[:LARGE].view(1 << 11, -1)
    leaf = Leaf(whole, whole, whole, whole, torch.zeros(()))
    assert suits(leaf)
    for other in (large[1 : LARGE + 1].view(1 << 11, -1), large[: 2 * LARGE : 2].view(1 << 11, -1), whole.T):
        for field in ("p", "grad", "m", "v"):
            assert not suits(leaf._replace(**{field: other})), field
    for n in (LARGE - 16, LARGE + 8):
        flat = large[:n]
        assert not suits(Leaf(flat, flat, flat, flat, torch.zeros(())))


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    adamw._compiled.cache_clear()
    with caplog.at_level(logging.INFO, "usp"):
        for _ in range(3):
            update_large(leaves_of(torch.float32, (64,)), lr=0.1, grad_scale=None, **FIXED)
    assert [record.message[:29] for record in caplog.records] == ["compiling the update of AdamW"]
