"""Where what a scan remembers is kept between forward and backward: with autograd, or on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from usp.arena import Arena, Copied, Copies, Lease, wait_for


class Visit(NamedTuple):
    """One run of a layer in the backward: whether its input comes from memory, and whether it is the run that
    makes the gradient (otherwise a group's forward)."""

    layer: int
    with_input: bool
    is_last: bool


class Stored(NamedTuple):
    """Of one layer: its input, where wanted, and a call for each thing it kept, which waits for it."""

    x: Tensor | None
    kept: list[Callable[[], Tensor]]
    at_hand: bool = True
    """Whether there is nothing to wait for."""


class Reader(Protocol):
    """What was stored, visit by visit."""

    def take(self) -> Stored:
        """What the next visit needs."""
        ...

    def ahead(self) -> None:
        """Fetch what the visit after this one needs, unless that is under way already."""
        ...

    def stop(self) -> None:
        """From here on the stream that computes finds every copy done: also after an error."""
        ...


class Memory(Protocol):
    keeps_input: bool
    """Whether autograd must save the scan's own input."""

    def put_input(self, layer: int, x: Tensor | None) -> None: ...

    def put_kept(self, layer: int, kept: Sequence[Tensor]) -> None: ...

    def outputs(self) -> list[Tensor]:
        """What autograd is to save."""
        ...

    def reader(self, saved: Sequence[Tensor], visits: Sequence[Visit]) -> Reader:
        """`saved`: the scan's input, where kept by autograd, and the `outputs`."""
        ...


class PlainMemory:
    """On the device. Autograd holds the tensors, so that it decides when they go."""

    keeps_input = True

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._inputs: dict[int, int] = {0: 0}  # layer -> place in `saved`
        self._kept: list[range] = []

    def put_input(self, layer: int, x: Tensor | None) -> None:
        if x is not None and layer:
            self._inputs[layer] = len(self._tensors) + 1
            self._tensors.append(x.detach())

    def put_kept(self, layer: int, kept: Sequence[Tensor]) -> None:
        start = len(self._tensors) + 1
        self._tensors += [t.detach() for t in kept]  # never the very tensor that is the result
        self._kept.append(range(start, start + len(kept)))

    def outputs(self) -> list[Tensor]:
        tensors, self._tensors = self._tensors, []
        return tensors

    def reader(self, saved: Sequence[Tensor], visits: Sequence[Visit]) -> Reader:
        return _Saved(saved, self._inputs, self._kept, visits)


class _Saved:
    def __init__(
        self,
        saved: Sequence[Tensor],
        inputs: Mapping[int, int],
        kept: Sequence[range],
        visits: Sequence[Visit],
    ) -> None:
        self._saved, self._inputs, self._kept, self._visits = saved, inputs, kept, iter(visits)

    def take(self) -> Stored:
        layer, with_input, _ = next(self._visits)
        x = self._saved[self._inputs[layer]] if with_input else None
        return Stored(x, [partial(self._saved.__getitem__, n) for n in self._kept[layer]])

    def ahead(self) -> None:
        pass

    def stop(self) -> None:
        pass


class HostMemory:
    """On the host, in buffers of an arena. The last layer's stays where it is: it is needed at once.

    A device tensor is let go when its copy is done, in stream order: before a layer runs, the stream waits
    for the copies of the layer before the last, so that two layers' worth at most is under way and the host
    never waits. In the backward the next layer's come when this one's have been used: see `Kept.last_use`.
    The lease on the buffers ends with the first backward, or when the scan is forgotten.
    """

    keeps_input = False

    def __init__(self, arena: Arena, num_layers: int, group: int) -> None:
        self._arena, self._num_layers = arena, num_layers
        self._num_inputs = -(-(num_layers - 1) // group)
        self._lease: Lease | None = arena.lease()
        self._copies: Copies | None = None
        self._inputs: dict[int, Copied] = {}
        self._kept: dict[int, list[Copied]] = {}
        self._last: tuple[Tensor | None, list[Tensor]] = None, []
        self._under_way: list[list[tuple[Tensor, Copied]]] = []  # layer by layer

    def put_input(self, layer: int, x: Tensor | None) -> None:
        self._wait_for(1)
        self._under_way.append([])
        if layer == self._num_layers - 1:
            self._last = x, []
        elif x is not None:
            if layer == 0:
                self._check_host(x.nbytes * self._num_inputs)
            self._inputs[layer] = self._out(x)

    def put_kept(self, layer: int, kept: Sequence[Tensor]) -> None:
        if layer == self._num_layers - 1:
            self._last = self._last[0], list(kept)
        else:
            if layer == 0:
                inputs = self._inputs[0].tensor.nbytes * (self._num_inputs - 1)
                self._check_host(inputs + sum(t.nbytes for t in kept) * (self._num_layers - 1))
            self._kept[layer] = [self._out(t) for t in kept]

    def outputs(self) -> list[Tensor]:
        self._wait_for(0)
        return []

    def reader(self, saved: Sequence[Tensor], visits: Sequence[Visit]) -> Reader:
        if self._lease is None:
            raise RuntimeError(
                "offload='host' keeps what one backward needs. Run the forward again, or use offload='none'."
            )
        lease, self._lease = self._lease, None
        return _FromHost(self, lease, visits)

    def last(self, visit: Visit) -> Stored:
        """Of the last layer, which is let go."""
        x, kept = self._last
        self._last = None, []
        return Stored(x if visit.with_input else None, [partial(_itself, t) for t in kept])

    def _wait_for(self, left: int) -> None:
        """Let go of what was copied, but for the last `left` layers."""
        while len(self._under_way) > left:
            for _, copied in self._under_way.pop(0):
                copied.wait()

    def start(self, visit: Visit) -> list[Copied]:
        """Copies back to the device, under way: the input, where wanted, and what was kept."""
        if self.stays(visit):
            return []
        wanted = [self._inputs[visit.layer]] if visit.with_input else []
        assert self._copies is not None
        return [self._copies.back(c.tensor, c.device) for c in (*wanted, *self._kept[visit.layer])]

    def forget(self) -> None:
        """What lies in the buffers, which go back to the arena: a graph that is kept does not hold them."""
        self._inputs, self._kept = {}, {}

    def stays(self, visit: Visit) -> bool:
        return visit.layer == self._num_layers - 1

    def _out(self, t: Tensor) -> Copied:
        assert self._lease is not None
        if self._copies is None:
            self._copies = self._arena.copies(t.device)
        copied = self._copies.out(t, self._lease.take(t))
        self._under_way[-1].append((t, copied))
        return copied

    def _check_host(self, need: int) -> None:
        """ValueError when so many bytes, judged from the first layer and yet to come, do not fit the host."""
        have = self._arena.left()
        if have is not None and need > have + self._arena.free_bytes:
            raise ValueError(
                f"host memory={have} bytes available must hold what offload='host' keeps, got {need} bytes "
                f"more beside the {self._arena.nbytes} of the arena. Use more ranks on other hosts, a larger "
                f"group, or remat='full'."
            )


class _FromHost:
    """A backward's copies back, one visit's under way at most. It has the lease, which ends with it."""

    def __init__(self, memory: HostMemory, lease: Lease, visits: Sequence[Visit]) -> None:
        self._memory, self._lease, self._visits = memory, lease, deque(visits)
        self._coming: list[Copied] | None = None
        self._handed: list[Callable[[], None]] = []  # waits for what the visit under way may not have read

    def ahead(self) -> None:
        if self._coming is None and self._visits:
            self._coming = self._memory.start(self._visits[0])

    def take(self) -> Stored:
        self.ahead()
        assert self._coming is not None
        visit, copies = self._visits.popleft(), self._coming
        self._coming, self._handed = None, []
        if self._memory.stays(visit):
            return self._memory.last(visit)
        x = copies.pop(0).ready() if visit.with_input else None
        self._handed = [partial(wait_for, c.event, c.device) for c in copies]
        return Stored(x, [c.ready for c in copies], at_hand=False)

    def stop(self) -> None:
        for wait in (*self._handed, *(copied.wait for copied in self._coming or ())):
            wait()
        self._memory.forget()


def _itself(t: Tensor) -> Tensor:
    return t
