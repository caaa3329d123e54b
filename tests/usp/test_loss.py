"""`linear_cross_entropy` against torch's own on whole logits in float64, and what makes it worth having."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vjp, vmap

import usp.loss
from tests.usp.dense import Watch, normal
from usp import linear_cross_entropy, value_and_grad

TOKENS, DIM, VOCAB = 41, 5, 53
BOTH = (0, 1)
# float64 rounding of sums over at most 53 classes and 41 tokens, relative to the largest entry
ROUNDING = 1e-13


def data(*, ignored: int = 7, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = normal(TOKENS, DIM, seed=1, dtype=dtype), normal(VOCAB, DIM, seed=2, dtype=dtype)
    labels = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(3))
    labels[:ignored] = -100
    return x, weight, labels[torch.randperm(TOKENS, generator=torch.Generator().manual_seed(4))]


def whole(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = (x @ weight.T).flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")


def close(got: Tensor, want: Tensor, tolerance: float = ROUNDING) -> bool:
    return got.shape == want.shape and bool((got - want).abs().max() <= tolerance * want.abs().max())


@pytest.mark.parametrize("tile", [1, 8, 41, 1000])
def test_equal_to_torch(tile: int) -> None:
    x, weight, labels = data()
    value, grads = value_and_grad(lambda x, w: linear_cross_entropy(x, w, labels, tile=tile), BOTH)(x, weight)
    assert close(value, whole(x, weight, labels))
    for got, want in zip(grads, grad(whole, BOTH)(x, weight, labels), strict=True):
        assert close(got, want)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    linear_cross_entropy(*leaves, labels, tile=tile).backward()
    assert all(torch.equal(leaf.grad, g) for leaf, g in zip(leaves, grads, strict=True))  # type: ignore[arg-type]


def test_leading_dimensions() -> None:
    x, weight, labels = (
        normal(3, 2, 7, DIM, seed=1),
        normal(VOCAB, DIM, seed=2),
        torch.arange(42).view(3, 2, 7),
    )
    grads = grad(lambda x: linear_cross_entropy(x, weight, labels, tile=4))(x)
    assert close(grads, grad(whole)(x, weight, labels))
    strided = x.movedim(0, 2)
    assert close(linear_cross_entropy(strided, weight, labels.movedim(0, 2)), whole(x, weight, labels))


@pytest.mark.parametrize("factor", [0.25, -3.7, 1e-6])
def test_the_incoming_gradient_scales_every_gradient(factor: float) -> None:
    # case D16: also the weight's, where a gradient made in the forward would not be scaled
    x, weight, labels = data()
    plain = grad(lambda x, w: linear_cross_entropy(x, w, labels, tile=8), BOTH)(x, weight)
    scaled = grad(lambda x, w: factor * linear_cross_entropy(x, w, labels, tile=8), BOTH)(x, weight)
    for got, want in zip(scaled, plain, strict=True):
        assert close(got, factor * want)  # each term is rounded once more


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_no_valid_label(dtype: torch.dtype) -> None:
    # cases H22, D12, D52: zero, not NaN, and still part of the graph
    x, weight, labels = data(ignored=TOKENS, dtype=dtype)
    leaves = x.requires_grad_(), weight.requires_grad_()
    value = linear_cross_entropy(*leaves, labels, tile=8)
    assert value.item() == 0.0
    assert value.grad_fn is not None
    value.backward()
    assert all(torch.equal(leaf.grad, torch.zeros_like(leaf)) for leaf in leaves)  # type: ignore[arg-type]


def test_a_rank_without_tokens() -> None:
    # case D12: an uneven cut may leave a rank with none
    x, weight, labels = (
        normal(2, 0, DIM, seed=1),
        normal(VOCAB, DIM, seed=2),
        torch.empty(2, 0, dtype=torch.int64),
    )
    value, grads = value_and_grad(lambda x, w: linear_cross_entropy(x, w, labels), BOTH)(x, weight)
    assert value.item() == 0.0
    assert grads[0].shape == (2, 0, DIM)
    assert torch.equal(grads[1], torch.zeros_like(weight))


def test_ignored_tokens_have_exactly_no_gradient() -> None:
    x, weight, labels = data()
    grads = grad(lambda x: linear_cross_entropy(x, weight, labels, tile=8))(x)
    assert torch.equal((grads != 0).any(-1), labels != -100)


def test_memory_of_one_tile() -> None:
    # case H66: nothing of [T, V], forward or backward; the tile's logits are the largest tensor there is
    x, weight, labels = data()
    tile = 8
    with Watch() as watch:
        value_and_grad(lambda x, w: linear_cross_entropy(x, w, labels, tile=tile), BOTH)(x, weight)
    assert watch.largest == tile * VOCAB < TOKENS * VOCAB
    with Watch() as dense:
        value_and_grad(lambda x, w: whole(x, w, labels), BOTH)(x, weight)
    assert dense.largest == TOKENS * VOCAB  # the measurement sees it where it exists


def test_gradients_over_two_tiles_of_logits() -> None:
    # case H66: first gradients hold one gradient of the weight, its tile's part, and two tiles of logits
    x, weight, labels = data()
    peaks = {}
    for tile in (4, 8):
        with Watch() as watch:
            value_and_grad(lambda x, w, t=tile: linear_cross_entropy(x, w, labels, tile=t), BOTH)(x, weight)
        peaks[tile] = watch.peak
        held = 2 * weight.nbytes + 3 * x.nbytes  # x's gradient in tiles and joined
        assert watch.peak <= held + 3 * tile * VOCAB * 8
    assert peaks[4] < peaks[8]


def test_no_grad_inside_vmap() -> None:
    x, weight, labels = data()
    pull = vjp(lambda x, w: linear_cross_entropy(x, w, labels, tile=8), x, weight)[1]
    factors = torch.tensor([1.0, -2.0], dtype=torch.float64)
    with torch.no_grad():
        many = vmap(pull)(factors)
    for got, want in zip(many, pull(torch.ones((), dtype=torch.float64)), strict=True):
        assert close(got[1], -2 * want)


def test_tiles_do_not_depend_on_the_data() -> None:
    # cases D45, D46: the very same operations on the same shapes, whatever the labels
    def operations(ignored: int) -> list[str]:
        x, weight, labels = data(ignored=ignored)
        with Watch() as watch:
            value_and_grad(lambda x, w: linear_cross_entropy(x, w, labels, tile=8), BOTH)(x, weight)
        return watch.ops

    assert operations(0) == operations(7) == operations(TOKENS)


def test_tiles_stay_below_the_32_bit_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    # case D53
    assert usp.loss.MAX_TILE_ELEMENTS < 2**31
    x, weight, labels = data()
    for limit, largest in ((8 * VOCAB + 1, 8 * VOCAB), (VOCAB - 1, VOCAB * DIM)):  # at least one token a tile
        monkeypatch.setattr(usp.loss, "MAX_TILE_ELEMENTS", limit)
        with Watch() as watch:
            value = linear_cross_entropy(x, weight, labels)
        assert watch.largest <= largest
        assert close(value, whole(x, weight, labels))


def test_bfloat16_sums_in_float32() -> None:
    # case D50. 512 tiles whose parts all have one sign, so that a bfloat16 sum stops growing.
    tokens = 4096
    x = normal(tokens, DIM, seed=1).abs().bfloat16()
    weight = torch.zeros(VOCAB, DIM, dtype=torch.bfloat16)
    labels = torch.zeros(tokens, dtype=torch.int64)
    value, got = value_and_grad(lambda w: linear_cross_entropy(x, w, labels, tile=8))(weight)
    want = grad(lambda w: whole(x.double(), w, labels))(weight.double())
    assert value.dtype == torch.float32
    assert got.dtype == torch.bfloat16
    # the logits' gradient, each tile's part and the result are rounded to bfloat16 once each: 3 times 2^-9
    assert ((got.double() - want).abs() / want.abs()).max() <= 3 * 2.0**-9
    naive = torch.zeros(VOCAB, DIM, dtype=torch.bfloat16)
    for part in x.split(8):
        naive += grad(lambda w, part=part: whole(part.double(), w, labels[:8]))(weight.double()).bfloat16()
    assert ((naive.double() - want).abs() / want.abs()).max() > 0.2  # what it would be without


def test_higher_derivatives_and_transforms() -> None:
    x, weight, labels = data()
    tangents = normal(TOKENS, DIM, seed=5), normal(VOCAB, DIM, seed=6)

    def tiled(x: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, labels, tile=8)

    def dense(x: Tensor, w: Tensor) -> Tensor:
        return whole(x, w, labels)

    results = []
    for f in (tiled, dense):
        slope = grad(f, BOTH)
        xs = torch.stack([x, 2 * x])
        results.append(
            [
                jvp(f, (x, weight), tangents)[1],
                jvp(lambda x, f=f: f(x, weight), (x,), tangents[:1])[1],
                *jvp(slope, (x, weight), tangents)[1],  # forward over reverse
                *grad(
                    lambda *y, s=slope: sum((g * t).sum() for g, t in zip(s(*y), tangents, strict=True)), BOTH
                )(x, weight),  # reverse over reverse
                hessian(f)(x, weight),
                vmap(f, (0, None))(xs, weight),
                vmap(grad(f), (0, None))(xs, weight),
                grad(lambda c, f=f: grad(lambda x: c * f(x, weight))(x).square().sum())(
                    torch.tensor(2.0).double()
                ),
            ]
        )
    for got, want in zip(*results, strict=True):
        assert close(got, want)


def test_dual_numbers_and_many_gradients_at_once() -> None:
    """Of tensors that autograd follows: forward mode beside it, and `is_grads_batched`."""
    x, weight, labels = data()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    along = torch.randn_like(x)
    with forward_ad.dual_level():
        pair = forward_ad.unpack_dual(linear_cross_entropy(forward_ad.make_dual(x, along), weight, labels))
        assert pair.tangent is not None
        assert close(pair.tangent, (grad(whole)(x.detach(), weight.detach(), labels) * along).sum())
    value = linear_cross_entropy(x, weight, labels)
    factors = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
    many = torch.autograd.grad(value, (x, weight), factors, is_grads_batched=True)
    for got, want in zip(many, grad(whole, BOTH)(x.detach(), weight.detach(), labels), strict=True):
        assert close(got, factors[:, None, None] * want)


def test_compiled_in_one_graph() -> None:
    x, weight, labels = data()

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, labels, tile=16)

    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    by_autograd = torch.autograd.grad(
        torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), leaves
    )
    by_func = torch.compile(grad(loss, BOTH), fullgraph=True, backend="aot_eager")(x, weight)
    for got, other, want in zip(by_autograd, by_func, grad(loss, BOTH)(x, weight), strict=True):
        assert close(got, want)
        assert close(other, want)


def test_refused() -> None:
    x, weight, labels = data()
    for bad in (
        (x, weight, labels[1:]),
        (x, weight[:, 1:], labels),
        (x, weight[0], labels),
        (x[None], weight, labels),
    ):
        with pytest.raises(ValueError, match="must have the leading shape of x"):
            linear_cross_entropy(*bad)
    with pytest.raises(ValueError, match="tile=0 must be at least 1"):
        linear_cross_entropy(x, weight, labels, tile=0)
