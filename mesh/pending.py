"""Collectives under way: leaves that are gathered, or summed and scattered, together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from usp.mesh.cast import as_dtype
from usp.mesh.groups import Stages, gather_each, gather_flat, scatter_each, scatter_flat
from usp.mesh.packing import Slot, pack_full, pack_shards, unpack_full, unpack_shards

_ops = torch.ops._c10d_functional
Leaf = Tensor | None


class Pending:
    """A move under way. `wait()` once, for the results; on a GPU it holds up the stream, not the host."""

    def __init__(self, finish: Callable[[], list[Leaf]]) -> None:
        self._finish: Callable[[], list[Leaf]] | None = finish

    def wait(self) -> list[Leaf]:
        assert self._finish is not None, "wait() is called once"
        finish, self._finish = self._finish, None
        return finish()


def start_gather(
    stages: Stages, slots: Sequence[Slot], shards: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Sequence[Slot], Pending]:
    """Leaves whose parts, one after the other, are the leaf travel as they are; others in one flat buffer."""
    if len(stages) == 1 and all(s.in_order for s in slots):
        arrived = gather_each(as_dtype(shards, dtype), stages[0])
        return slots, Pending(lambda: list(arrived()))
    flat = pack_shards(slots, shards, dtype)
    work = gather_flat(flat, stages[-1])

    def finish() -> list[Leaf]:
        buffer = _ops.wait_tensor(work)
        for stage in reversed(stages[:-1]):
            buffer = _ops.wait_tensor(gather_flat(buffer, stage))
        return list(unpack_full(slots, buffer.view(len(slots[0].pieces), flat.numel())))

    return slots, Pending(finish)


def start_scatter(
    stages: Stages, slots: Sequence[Slot], whole: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Sequence[Slot], Pending]:
    """The mirror of `start_gather`."""
    if len(stages) == 1 and all(s.in_order for s in slots):
        started = scatter_each(as_dtype(whole, dtype), stages[0])
        return slots, Pending(lambda: [_ops.wait_tensor(t) for t in started])
    buffer = pack_full(slots, whole, dtype)
    work = scatter_flat(buffer, stages[0])

    def finish() -> list[Leaf]:
        flat = _ops.wait_tensor(work)
        for stage in stages[1:]:
            flat = _ops.wait_tensor(scatter_flat(flat, stage))
        return list(unpack_shards(slots, flat.view(-1)))

    return slots, Pending(finish)
