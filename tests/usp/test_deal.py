"""`deal_heads`: which heads each rank gets, for any numbers of heads and ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from usp.deal import _local_groups, deal_heads

COUNTS = st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(1, 32))  # also fewer heads than ranks


@given(COUNTS)
def test_every_head_once_and_balanced(counts: tuple[int, int, int]) -> None:
    # cases H49, H50, H52, D22, D26
    num_kv, group, parts = counts
    deals = deal_heads(num_kv * group, num_kv, parts)
    assert len(deals) == parts
    dealt = [head for d in deals for head in range(d.q_start, d.q_stop)]
    assert dealt == list(range(num_kv * group))
    loads = [d.q_stop - d.q_start for d in deals]
    assert max(loads) - min(loads) <= 1
    assert sorted(loads, reverse=True) == loads  # those without a head come last


@given(COUNTS)
def test_kv_heads_are_those_needed(counts: tuple[int, int, int]) -> None:
    # cases H48, H50, D25, D26
    num_kv, group, parts = counts
    for d in deal_heads(num_kv * group, num_kv, parts):
        needed = sorted({head // group for head in range(d.q_start, d.q_stop)})
        assert needed == list(range(d.kv_start, d.kv_stop))  # all of them, and no other
        assert 0 <= d.kv_start <= d.kv_stop <= num_kv


@given(COUNTS)
def test_local_groups_are_even(counts: tuple[int, int, int]) -> None:
    num_kv, group, parts = counts
    for d in deal_heads(num_kv * group, num_kv, parts):
        order = _local_groups(d, group)
        if d.q_start == d.q_stop:
            assert order is None
            continue
        slots = list(range(d.kv_stop - d.kv_start)) if order is None else order
        heads = range(d.q_start, d.q_stop)
        assert len(heads) % len(slots) == 0
        local_group = len(heads) // len(slots)
        assert [d.kv_start + slots[i // local_group] for i in range(len(heads))] == [
            h // group for h in heads
        ]


def test_one_rank_keeps_everything_as_it_is() -> None:
    (deal,) = deal_heads(9, 3, 1)
    assert deal == (0, 9, 0, 3)
    assert _local_groups(deal, 3) is None


@pytest.mark.parametrize(
    ("num_heads", "num_kv", "parts", "message"),
    [
        (9, 2, 2, "num_heads=9 must be a multiple of num_kv_heads"),
        (4, 0, 2, "num_kv_heads=0"),
    ],
)
def test_refused(num_heads: int, num_kv: int, parts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deal_heads(num_heads, num_kv, parts)
