"""`exchange`: one all-to-all of a flat buffer, its pieces already in the order in which they are sent.

For moves that no spec can say, such as heads that several ranks get, and where no copy may be made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from usp.mesh import collectives
from usp.mesh.devices import MeshLike, axis_sizes, group_name
from usp.mesh.linear import apply_linear


class Begun:
    """An exchange of plain values under way, to be finished by one `exchange(..., apart=)` of the same values
    with their history: that waits instead."""

    def __init__(
        self, x: Tensor, mesh: MeshLike, axis: str, *, send: tuple[int, ...], receive: tuple[int, ...]
    ) -> None:
        self._op = Exchange(group_name(mesh, axis), send, receive)
        self._started: Tensor | None = self._op.start(x.detach())

    def run(self, op: Exchange, x: Tensor) -> Tensor:
        """What the values became; x is not read."""
        assert op == self._op, "another exchange than the one that was begun"
        started, self._started = self._started, None
        assert started is not None, "an exchange is finished once"
        return collectives.wait(started)


class Unawaited:
    """Makes one `exchange(..., apart=)` begin only: nothing may read what it returns before `wait`."""

    def __init__(self) -> None:
        self._started: Tensor | None = None

    def run(self, op: Exchange, x: Tensor) -> Tensor:
        """Memory that what comes is written to."""
        self._started = op.start(x)
        return self._started

    def wait(self) -> None:
        started, self._started = self._started, None
        assert started is not None, "an exchange is begun once, and waited for once"
        collectives.wait(started)


@dataclass(frozen=True)
class Exchange:
    """x [*lead, sum of send] -> [*lead, sum of receive]. `apart`: begun or waited for elsewhere, this way."""

    group: str
    send: tuple[int, ...]
    receive: tuple[int, ...]
    lead: tuple[int, ...] = ()
    apart: Begun | Unawaited | None = field(default=None, compare=False)

    def empty(self) -> bool:
        return False

    def run(self, x: Tensor) -> Tensor:
        if self.apart is not None:
            return self.apart.run(self, x)
        if not self.lead:
            return collectives.exchange(x.contiguous(), self.group, self.send, self.receive)
        times = prod(self.lead)
        pieces = torch.split(x.reshape(times, sum(self.send)), list(self.send), 1)
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        send, receive = ([n * times for n in sizes] for sizes in (self.send, self.receive))
        came = torch.split(collectives.exchange(flat, self.group, send, receive), receive)
        return torch.cat([p.view(times, n) for p, n in zip(came, self.receive, strict=True)], 1).view(
            *self.lead, sum(self.receive)
        )

    def start(self, x: Tensor) -> Tensor:
        """Begin with a flat x; for `collectives.wait`."""
        return collectives.start_exchange(x.contiguous(), self.group, self.send, self.receive)

    def transposed(self) -> Exchange:
        return Exchange(self.group, self.receive, self.send, self.lead)

    def batched(self, size: int) -> Exchange:
        assert self.apart is None, "an exchange apart is for plain tensors"
        return Exchange(self.group, self.send, self.receive, (size, *self.lead))


def exchange(
    x: Tensor,
    mesh: MeshLike,
    axis: str,
    *,
    send: tuple[int, ...],
    receive: tuple[int, ...],
    apart: Begun | Unawaited | None = None,
) -> Tensor:
    """Cut a flat x into pieces of `send` elements, piece i for rank i of `axis`; join what comes.

    1 all-to-all. `receive[i]` is what rank i sends here; what comes lies in rank order. No copy is made of a
    contiguous x, nor of what arrives. Differentiable like `redistribute`. With one rank on `axis` x comes
    back as it is. `apart`: for plain tensors; begun before, or waited for later. Raises ValueError when the
    sizes are not one per rank or x is not as long as they say.
    """
    parts = axis_sizes(mesh)[axis]
    if len(send) != parts or len(receive) != parts:
        raise ValueError(
            f"send={send} and receive={receive} must name the {parts} ranks of {axis!r}. "
            f"Give one size per rank."
        )
    if x.dim() != 1 or x.shape[0] != sum(send):
        raise ValueError(
            f"x={tuple(x.shape)} must be flat and hold {sum(send)} elements, as send={send} adds up to. "
            f"Flatten it, or pass sizes that add up."
        )
    if parts == 1:
        return x
    return apply_linear(x, Exchange(group_name(mesh, axis), tuple(send), tuple(receive), apart=apart))
