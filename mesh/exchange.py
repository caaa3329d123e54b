"""`exchange`: one all-to-all of a flat buffer, its pieces already in the order in which they are sent.

For moves that no spec can say, such as heads that several ranks get, and where no copy may be made.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from usp.mesh import collectives
from usp.mesh.devices import MeshLike, axis_sizes, group_name
from usp.mesh.linear import apply_linear


@dataclass(frozen=True)
class Exchange:
    """x [*lead, sum of send] -> [*lead, sum of receive]."""

    group: str
    send: tuple[int, ...]
    receive: tuple[int, ...]
    lead: tuple[int, ...] = ()

    def empty(self) -> bool:
        return False

    def run(self, x: Tensor) -> Tensor:
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

    def transposed(self) -> Exchange:
        return Exchange(self.group, self.receive, self.send, self.lead)

    def batched(self, size: int) -> Exchange:
        return Exchange(self.group, self.send, self.receive, (size, *self.lead))


def exchange(
    x: Tensor, mesh: MeshLike, axis: str, *, send: tuple[int, ...], receive: tuple[int, ...]
) -> Tensor:
    """Cut a flat x into pieces of `send` elements, piece i for rank i of `axis`; join what comes.

    1 all-to-all. `receive[i]` is what rank i sends here; what comes lies in rank order. No copy is made of a
    contiguous x, nor of what arrives. Differentiable like `redistribute`. With one rank on `axis` x comes
    back as it is. Raises ValueError when the sizes are not one per rank or x is not as long as they say.
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
    return apply_linear(x, Exchange(group_name(mesh, axis), tuple(send), tuple(receive)))
