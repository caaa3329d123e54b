"""One scan's forward and backward on plain tensors: what runs when, and what is fetched ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from usp.kept import Kept
from usp.scan.ambient import Autocast, Random
from usp.scan.handover import Handover, pull
from usp.scan.memory import Memory, Reader, Visit

Leaf = Tensor | None


class Pending(Protocol):
    def wait(self) -> list[Leaf]: ...


class Gather(Protocol):
    """How a layer's leaves come from rest to use, and their gradients back: `usp.mesh.bundle.Bundle`."""

    def __call__(self, tensors: Sequence[Leaf]) -> list[Leaf]:
        """Differentiably."""
        ...

    def start(self, tensors: Sequence[Leaf]) -> Pending: ...

    def start_transpose(self, grads: Sequence[Leaf], dtypes: Sequence[torch.dtype | None]) -> Pending: ...


class Wanted(NamedTuple):
    """Which gradients are asked for: x's, and each leaf's, layer by layer."""

    x: bool
    leaves: list[list[bool]]

    def first(self) -> int:
        """The lowest layer that must be gone through."""
        return 0 if self.x else next(i for i, layer in enumerate(self.leaves) if any(layer))


@dataclass
class Run:
    """Everything about one call of `scan` but its tensors, and what the forward leaves for the backward."""

    block: Callable[..., Tensor]
    trees: list[pytree.TreeSpec]
    num_leaves: list[int]
    with_kept: bool
    """Whether the block takes `kept`."""
    recording: bool
    """Whether what it keeps is remembered."""
    group: int
    gather: Gather | None
    memory: Memory
    device: torch.device
    each: Sequence[Mapping[str, Any]] = ()
    autocast: Autocast = field(default_factory=Autocast)
    random: list[Random] = field(default_factory=list)
    kept_trees: list[Any] = field(default_factory=list)
    arrived: Handover = field(default_factory=Handover)
    """The gradient of the result, in the backward."""

    def split(self, flat: Sequence[Any]) -> list[list[Any]]:
        """The leaves of all layers in a row -> layer by layer."""
        leaves = iter(flat)
        return [[next(leaves) for _ in range(count)] for count in self.num_leaves]

    def forward(self, x: Tensor, flat: Sequence[Any], consts: Sequence[Any], *, keep: bool = True) -> Tensor:
        """The result; with `keep`, `memory` holds what the backward needs."""
        layers = self.split(flat)
        weights = self.ahead(layers, range(len(layers)))
        for i in range(len(layers)):
            leaves = next(weights)
            if keep:
                self.random.append(Random(self.device))
                self.memory.put_input(i, x if i % self.group == 0 else None)
            version, kept = x._version if keep else 0, Kept(recording=self.recording)
            y = self.call(i, x, leaves, consts, kept)
            del leaves  # before the next layer's are unpacked
            if keep and x._version != version:
                raise ValueError("block must not write its input in place: the scan keeps it. Make a copy.")
            if keep:
                self.memory.put_kept(i, kept.tensors)
                self.kept_trees.append(kept.trees)
            x = y
        return x

    def backward(
        self,
        handover: Handover,
        saved: Sequence[Tensor],
        flat: Sequence[Any],
        consts: Sequence[Any],
        wanted: Wanted,
    ) -> tuple[Tensor | None, list[list[Leaf]]]:
        """Gradients of x and, layer by layer, of the leaves that want one. `handover`: that of the result."""
        visits = self._visits(len(self.num_leaves), wanted.first())
        memory = self.memory.reader(saved, visits)
        try:
            return self._back(handover, visits, memory, self.split(flat), consts, wanted)
        finally:
            memory.stop()

    def _back(
        self,
        handover: Handover,
        visits: Sequence[Visit],
        memory: Reader,
        layers: list[list[Any]],
        consts: Sequence[Any],
        wanted: Wanted,
    ) -> tuple[Tensor | None, list[list[Leaf]]]:
        weights = self.ahead(layers, [visit.layer for visit in visits])
        inputs: dict[int, Tensor] = {}
        grads: list[list[Leaf]] = [[None] * count for count in self.num_leaves]
        coming: tuple[int, Pending] | None = None
        for i, _, is_last in visits:
            leaves = next(weights)
            stored = memory.take()
            if stored.x is not None:
                inputs[i] = stored.x
            kept = Kept.replay(
                stored.kept,
                self.kept_trees[i],
                recording=self.recording,
                value_unused=is_last,
                own_grad=is_last and handover.own,
                at_hand=stored.at_hand,
                go_on=memory.ahead,
            )
            del stored  # so that each goes when it was used
            if not is_last:  # a group's forward, to find the inputs of its layers
                memory.ahead()
                with torch.no_grad(), self.random[i].replayed(), self.autocast.entered():
                    inputs[i + 1] = self.call(i, inputs[i], leaves, consts, kept)
                kept.done()
                del leaves
                continue
            need_x = i > wanted.first() or wanted.x
            handover, found = self._pull(
                i, inputs.pop(i), leaves, consts, kept, handover, need_x, wanted.leaves[i]
            )
            del leaves, kept
            if self.gather is None:
                grads[i] = found
                continue
            if coming is not None:
                grads[coming[0]] = coming[1].wait()
            dtypes = [t.dtype if want else None for t, want in zip(layers[i], wanted.leaves[i], strict=True)]
            coming = i, self.gather.start_transpose(found, dtypes)
            del found  # not held while the next layer is gone through
        if coming is not None:
            grads[coming[0]] = coming[1].wait()
        return handover.grad, grads

    def _pull(
        self,
        i: int,
        x: Tensor,
        leaves: list[Any],
        consts: Sequence[Any],
        kept: Kept,
        handover: Handover,
        need_x: bool,
        want: list[bool],
    ) -> tuple[Handover, list[Leaf]]:
        """One layer's run with a graph, and its gradients. What it leaves unused has a gradient of zero."""
        with torch.enable_grad(), self.random[i].replayed(), self.autocast.entered():
            x = x.detach().requires_grad_(need_x)
            leaves = [t.detach().requires_grad_() if w else t for t, w in zip(leaves, want, strict=True)]
            y = self.call(i, x, leaves, consts, kept)
        kept.done()
        kept.prepared()
        wrt = [x] * need_x + [t for t, w in zip(leaves, want, strict=True) if w]
        if not wrt:
            return Handover(), [None] * len(leaves)
        origin = handover.follow()
        found = pull(y, wrt, handover)
        del y
        below = origin.handover(found.pop(0), found) if need_x else Handover()
        rest = iter(found)
        return below, [next(rest) if w else None for w in want]

    def call(
        self, i: int, x: Tensor, leaves: list[Any], consts: Sequence[Any], kept: Kept | None = None
    ) -> Tensor:
        more: dict[str, Any] = {"kept": kept} if self.with_kept else {}
        if self.each:
            more.update(self.each[i])
        return self.block(x, pytree.tree_unflatten(leaves, self.trees[i]), *consts, **more)

    def ahead(self, layers: list[list[Any]], order: Sequence[int]) -> Iterator[list[Any]]:
        """Leaves in use, in `order`: the next layer's gather is under way while one is computed."""
        if self.gather is None:
            yield from (list(layers[i]) for i in order)
            return
        pending = self.gather.start(layers[order[0]])
        for n in range(len(order)):
            # handed out without a name here, so that they are gone when the block is done with them
            held = [pending.wait()]
            if n + 1 < len(order):
                pending = self.gather.start(layers[order[n + 1]])
            yield held.pop()

    def _visits(self, num_layers: int, first: int) -> list[Visit]:
        """The backward's order: groups from the last to the first, each forward and then in reverse."""
        visits = []
        for start in reversed(range(0, num_layers, self.group)):
            stop = min(start + self.group, num_layers)
            if stop <= first:
                break
            ahead = range(start, stop - 1)
            back = range(stop - 1, max(start, first) - 1, -1)
            visits += [Visit(i, i == start, False) for i in ahead]
            visits += [Visit(i, i == start == stop - 1, True) for i in back]
        return visits
