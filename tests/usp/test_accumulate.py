"""Accumulation: the parts of a batch give what the whole gives, whatever their counts of valid labels."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.usp.dense import normal
from usp import Batch, linear_cross_entropy, shard_batch, value_and_grad
from usp.accumulate import accumulate, split_batch
from usp.mesh import TABLES

ONE = {"dp": 1, "ring": 1, "ulysses": 1}
VOCAB, DIM, ROWS, SEQ = 13, 5, 4, 6


def batch(valid: tuple[int, ...]) -> Batch:
    """`valid`: tokens of each row that count as targets."""
    tokens = torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    for row, count in enumerate(valid):
        labels[row, count + 1 :] = -100
    return Batch(tokens=tokens, labels=labels, cu_seqlens=tuple([0, row, SEQ] for row in range(1, 5)))


def loss(params: dict[str, Any], shard: Any) -> Tensor:
    x = torch.nn.functional.embedding(shard.tokens, params["embed"])
    total = linear_cross_entropy(x, params["head"], shard.labels)
    return total / shard.num_valid.clamp(min=1).to(total.dtype)


def shards(whole: Batch, parts: int) -> list[Any]:
    return [shard_batch(part, table=TABLES["ulysses"], mesh=ONE) for part in split_batch(whole, parts)]


def params(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {
        "embed": normal(VOCAB, DIM, seed=1, dtype=dtype),
        "none": None,
        "head": normal(VOCAB, DIM, seed=2, dtype=dtype),
    }


@pytest.mark.parametrize("valid", [(5, 5, 5, 5), (5, 1, 0, 3), (5, 5, 0, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_equal_to_the_whole_batch(parts: int, valid: tuple[int, ...]) -> None:
    # cases H4, H5, D6: the denominator counts the valid tokens of all parts, also where one has none
    whole = batch(valid)
    (one,) = shards(whole, 1)
    want_loss, want = value_and_grad(loss)(params(), one)
    got_loss, got = accumulate(value_and_grad(loss), params(), shards(whole, parts))
    # float64 sums of the same 20 terms in another order
    assert abs(got_loss - want_loss) <= 1e-14 * abs(want_loss)
    assert got["none"] is None
    for name in ("embed", "head"):
        assert (got[name] - want[name]).abs().max() <= 1e-14 * want[name].abs().max()


def test_sums_in_float32() -> None:
    # case D50: small parts added in bfloat16 to a large sum would be lost
    steps = iter([256.0] + [1.0] * 8)

    def steady(_: Any, shard: Any) -> tuple[Tensor, Any]:
        return torch.zeros(()), [torch.full((3,), next(steps), dtype=torch.bfloat16), None]

    (one,) = shards(batch((5, 5, 5, 5)), 1)
    _, (total, none) = accumulate(steady, None, [one] * 9)
    assert none is None
    assert total.dtype == torch.bfloat16
    assert torch.equal(total, torch.full((3,), 264.0, dtype=torch.bfloat16))


def test_refused() -> None:
    with pytest.raises(ValueError, match="batch size=4 must be a multiple of the parts"):
        split_batch(batch((5, 5, 5, 5)), 3)
    with pytest.raises(ValueError, match="shards must hold at least one"):
        accumulate(value_and_grad(loss), params(), [])


def test_gradients_of_a_part_are_let_go() -> None:
    """They are gone before the next part starts; those of a single part are returned as they are."""
    alive: list[weakref.ref[Tensor]] = []
    most = []

    def of_part(p: dict[str, Any], shard: Any) -> tuple[Tensor, dict[str, Any]]:
        most.append(sum(ref() is not None for ref in alive))
        value, grads = value_and_grad(loss)(p, shard)
        alive[:] = [weakref.ref(grads["embed"]), weakref.ref(grads["head"])]
        return value, grads

    whole = batch((5, 1, 0, 3))
    accumulate(of_part, params(), shards(whole, 4))
    assert most == [0, 0, 0, 0]
    _, got = accumulate(of_part, params(), shards(whole, 1))
    assert all(ref() is got[name] for ref, name in zip(alive, ("embed", "head"), strict=True))
