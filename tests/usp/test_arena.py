"""Buffers of the host: who gets which, and that they do not add up."""

import gc

import pytest
import torch
from torch import Tensor

from usp.arena import Arena


def room(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def step(arena: Arena, *sizes: int) -> list[int]:
    """One lease that asks for these bytes: where its tensors lie."""
    lease = arena.lease()
    found = [lease.take(room(size)).data_ptr() for size in sizes]
    assert len(set(found)) == len(found)
    lease.end()
    assert arena.free_bytes == arena.nbytes
    return found


def test_every_place_keeps_its_buffer() -> None:
    arena = Arena()
    first = step(arena, 400, 100, 300)
    assert step(arena, 400, 100, 300) == first
    assert step(arena, 40, 10, 30) == first
    assert step(arena, 400) == first[:1]
    assert arena.nbytes == 800
    longer = step(arena, 400, 200, 300, 50)
    assert [longer[0], longer[2]] == [first[0], first[2]]
    assert arena.nbytes == 950
    assert step(arena, 1, 2, 3, 4) == longer


def test_leases_at_once_find_their_own_again() -> None:
    """Two scans in one step, of which the second ends first."""
    arena, found = Arena(), []
    for _ in range(3):
        a, b = arena.lease(), arena.lease()
        places = [a.take(room(500)), b.take(room(20)), a.take(room(60)), b.take(room(700))]
        found.append([t.data_ptr() for t in places])
        b.end()
        assert arena.free_bytes == 720
        a.end()
        assert arena.free_bytes == arena.nbytes == 1280
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 4


def test_leases_that_end_in_reverse_find_their_own_again() -> None:
    """As those of a model's segments do: lengths of their own, beginning alike."""
    arena, found = Arena(), []
    for _ in range(3):
        leases, lengths = [arena.lease() for _ in range(3)], (2, 5, 1)
        taken = [[lease.take(room(100)) for _ in range(n)] for lease, n in zip(leases, lengths, strict=True)]
        found.append([t.data_ptr() for ts in taken for t in ts])
        for lease in reversed(leases):
            lease.end()
        assert arena.nbytes == 800
    assert found[0] == found[1] == found[2]


def test_what_one_lease_has_no_other_gets() -> None:
    arena = Arena()
    step(arena, 100, 100)
    one, other = arena.lease(), arena.lease()
    held = one.take(room(100)).fill_(1)
    other.take(room(100)).fill_(2)
    assert int(held.sum()) == 100
    assert arena.nbytes == 200
    del one, other
    gc.collect()
    assert arena.free_bytes == arena.nbytes


@pytest.mark.parametrize("place", [0, 1, 2])
def test_counts_hold_after_a_buffer_that_could_not_be_made(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena()
    step(arena, 10, 10, 10)

    def refuse(nbytes: int, *, locked: bool) -> Tensor:
        raise RuntimeError("no memory")

    sizes = [10, 10, 10]
    sizes[place] = 50
    monkeypatch.setattr(arena, "make", refuse)
    with pytest.raises(RuntimeError, match="no memory"):
        step(arena, *sizes)
    monkeypatch.undo()
    gc.collect()
    assert arena.free_bytes == arena.nbytes == 20
    step(arena, *sizes)
    assert arena.nbytes == sum(sizes)
