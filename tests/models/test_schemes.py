"""Every table with small models of this library's own: loss, logits and every gradient of one process."""

import pytest

from tests.mesh.cases import Sizes
from tests.models.run_model import Result
from tests.models.run_schemes import CONFIGS, Scheme, alone, largest, leaks, on_ranks
from tests.pool import Pool, pool_of
from tests.schemes import SCHEMES
from usp.ring import gather_pays

# float64 sums of the same terms in another order, through two layers, relative to the largest entry of each
TOLERANCE = 1e-12
FOUR: dict[str, tuple[Sizes, ...]] = {
    "ulysses": ((1, 1, 4), (2, 1, 2)),
    "ring": ((1, 4, 1), (2, 2, 1)),
    "usp": ((1, 2, 2), (1, 4, 1)),
    "odysseus": ((1, 2, 2), (1, 1, 4)),
    "replicated": ((2, 1, 2), (1, 2, 2)),
    "mine": ((1, 1, 4), (2, 1, 2)),
    "tp_sp": ((1, 1, 4), (2, 1, 2)),
    "ring_tp": ((1, 2, 2), (1, 1, 3)),
    "swapped": ((1, 2, 2), (1, 4, 1)),
}
WINDOWED = [
    Scheme(sizes, table, model, case)
    for table in ("ring", "usp", "odysseus", "mine", "tp_sp", "ring_tp", "swapped")
    for sizes, model, case in zip(
        FOUR[table], ("windows", "windows alike"), ("packed", "whole rows"), strict=True
    )
]
PLAIN = [
    Scheme(sizes, table, model, "packed", remat)
    for table in FOUR
    for sizes, model, remat in zip(FOUR[table], ("3/1 tied", "9/3"), ("full", "none"), strict=True)
]
SHORT = [
    Scheme(FOUR[table][case % 2], table, model, case)
    for table in FOUR
    for case, model in ((1, "9/3"), (2, "3/1 tied"), (3, "windows"))
]
CHUNKED = [
    Scheme((1, 2, 2), "usp", "windows", "packed", "attention", 3),
    Scheme((1, 1, 4), "ulysses", "30/10", "packed", "none", 4),
    Scheme((1, 4, 1), "ring", "windows", "packed", "none", 2),
]
TILED = [  # of own tokens with whole weights, and of more tokens with a part of the features
    Scheme((1, 2, 2), "usp", "3/1 tied", "packed", "attention", 1, 5),
    Scheme((2, 1, 2), "odysseus", "9/3", "packed", "full", 1, 4),
    Scheme((1, 1, 4), "mine", "3/1 tied", "whole rows", "full", 1, 7),
    Scheme((2, 1, 2), "tp_sp", "3/1 tied", "packed", "none", 1, 1),
]
EIGHT = [
    Scheme((1, 1, 8), "ulysses", "30/10", "packed"),
    Scheme((1, 2, 4), "odysseus", "windows", "packed"),
    Scheme((1, 1, 8), "mine", "9/3", "packed"),
    Scheme((2, 1, 4), "tp_sp", "3/1 tied", "packed"),
    Scheme((1, 4, 2), "ring_tp", "windows", "packed"),
    Scheme((1, 1, 7), "tp_sp", "9/3", "packed"),
    Scheme((1, 1, 5), "odysseus", "3/1 tied", "packed"),
    Scheme((1, 7, 1), "ring", "windows", 3),
    Scheme((1, 3, 2), "usp", "9/3", "packed"),
]


four = pool_of(4)


eight = pool_of(8)


def check(pool: Pool, schemes: list[Scheme]) -> None:
    by_rank = pool.run(on_ranks, schemes, timeout=400)
    whole: dict[tuple[str, str | int], Result] = {}
    for index, one in enumerate(schemes):
        found = [results[index] for results in by_rank if results[index] is not None]
        assert len(found) == one.sizes[0] * one.sizes[1] * one.sizes[2]
        key = (one.model, one.case)
        want = whole[key] = whole.get(key) or alone(*key)
        assert want.loss > 0
        for result in found:
            assert abs(result.loss - want.loss) <= TOLERANCE * want.loss, one
        first = found[0]
        assert (first.logits - want.logits).abs().max() <= TOLERANCE * want.logits.abs().max(), one
        assert first.grads.keys() == want.grads.keys()
        for name, grad in want.grads.items():
            scale = max(float(grad.abs().max()), 1e-3)  # of one token, queries and keys have no gradient
            assert (first.grads[name] - grad).abs().max() <= TOLERANCE * scale, (one, name)


def test_every_table(four: Pool) -> None:
    # cases D22, D25, H48, H50, H52, P52, P68
    assert {one.table for one in PLAIN} == SCHEMES.keys()
    check(four, PLAIN)


def test_windows(four: Pool) -> None:
    # cases H40, P30
    check(four, WINDOWED)


def test_one_to_three_tokens(four: Pool) -> None:
    # case H46
    check(four, SHORT)


def test_heads_in_parts(four: Pool) -> None:
    # cases D24, P45
    check(four, CHUNKED)


def test_tiles(four: Pool) -> None:
    # cases D42, D44, D45: on ranks, weights at rest in parts
    check(four, TILED)


def test_five_to_eight_ranks(eight: Pool) -> None:
    # cases H48, H50, H52, P45, P49
    check(eight, EIGHT)


@pytest.mark.parametrize(
    "one",
    [
        Scheme((1, 4, 1), "ring", "windows", "packed"),
        Scheme((1, 2, 2), "usp", "9/3", "packed"),
        Scheme((1, 2, 2), "usp", "9/3", "packed", "none", 3),
        Scheme((1, 1, 4), "ulysses", "30/10", "packed", "none", 2),
        Scheme((1, 1, 4), "odysseus", "9/3", "packed"),
    ],
    ids=str,
)
def test_no_document_reaches_another(one: Scheme, four: Pool) -> None:
    # cases H29, P52: to the last bit
    for inside, others in four.run(leaks, one):
        assert inside
        assert not others


@pytest.mark.parametrize(("model", "keys"), [("many keys", "sent around"), ("one key", "gathered")])
def test_nothing_is_as_large_as_the_scores(model: str, keys: str, four: Pool) -> None:
    """In no step of a ring: S / ring queries by as many keys, of one head."""
    seq_len, ring = 2048, 4
    cfg = CONFIGS[model]
    assert gather_pays(cfg.num_heads, cfg.num_kv_heads, ring) == (keys == "gathered")
    for elements in four.run(largest, model, (1, ring, 1), "ring", seq_len):
        assert elements < (seq_len // ring) ** 2
