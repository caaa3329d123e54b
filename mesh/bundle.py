"""`Bundle`: many tensors from rest to use with one all-gather, their gradients back with one reduce-scatter.

The flat buffer for all parameters of a layer is the idea of PyTorch's FSDP (Zhao et al., arXiv 2304.11277)
and ZeRO-3 (Rajbhandari et al., arXiv 1910.02054); here the placements decide what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from usp.mesh.cast import as_dtypes
from usp.mesh.collectives import sum_dtype
from usp.mesh.devices import MeshLike, axis_sizes, coordinates
from usp.mesh.groups import Stages, stages_of
from usp.mesh.linear_late import Journey, arrive, depart
from usp.mesh.linear_many import apply_many
from usp.mesh.move import Move
from usp.mesh.packing import Slot, alike, gathered_axes, make_slot
from usp.mesh.pending import Leaf, Pending, start_gather, start_scatter
from usp.mesh.redistribute import redistribute
from usp.mesh.spec import Axes, P, check_spec, local_shape


class _Route(NamedTuple):
    """Leaves that are gathered over the same axes: the groups to gather over, innermost last, and slots."""

    stages: Stages
    slots: tuple[Slot, ...]


class Bundle:
    """Moves leaf i from `srcs[i]` to `dsts[i]`, local shards in and out; None in all three for no leaf.

    `dsts[i]` keeps a prefix of the axes that cut one dimension of `srcs[i]` (any other move is carried out by
    `redistribute`, leaf by leaf). Leaves gathered over the same axes share ONE all-gather, their gradients
    ONE reduce-scatter: over the world for every axis larger than 1 of a mesh that covers it; else over the
    axis' group for one axis, and for several one collective an axis, as making a group for them would itself
    be a collective over all processes. `group` names a group of all the mesh's ranks, in rank
    order, to be used in place of the world's: one of its own keeps the gathers from queueing with other
    traffic. Leaves that do not move cost nothing.

    Floating-point leaves are cast to `dtype` before they travel. Gradients are summed in float32 or wider and
    come back in the dtype at rest. `shapes` are global; sizes need not be divisible.

    `bundle(tensors)` is differentiable: autograd, torch.func (grad, vjp, jvp, vmap, nested), torch.compile.
    `start` and `start_transpose` are for plain tensors and return a `Pending`. Every rank must make the same
    calls in the same order. Raises ValueError for specs that do not fit.
    """

    def __init__(
        self,
        srcs: Sequence[P | None],
        dsts: Sequence[P | None],
        mesh: MeshLike,
        shapes: Sequence[tuple[int, ...] | None],
        dtype: torch.dtype | None = None,
        group: str | None = None,
    ) -> None:
        if not len(srcs) == len(dsts) == len(shapes):
            raise ValueError(
                f"srcs={len(srcs)}, dsts={len(dsts)} and shapes={len(shapes)} must be of one length. "
                f"Give one of each for every leaf, None for no leaf."
            )
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype} must be floating point. Leave it out to keep the leaves' own.")
        self.srcs, self.dsts, self.shapes = tuple(srcs), tuple(dsts), tuple(shapes)
        self.mesh, self.dtype, self.group = mesh, dtype, group
        self._own: list[tuple[int, ...] | None] = [None] * len(srcs)
        self._moves: dict[int, Move] = {}
        found: dict[Axes, list[tuple[int, int, Axes]]] = {}
        sizes = axis_sizes(mesh)
        for i, (src, dst, shape) in enumerate(zip(srcs, dsts, shapes, strict=True)):
            if src is None or dst is None or shape is None:
                continue
            check_spec(src, mesh, len(shape), f"srcs[{i}]")
            check_spec(dst, mesh, len(shape), f"dsts[{i}]")
            self._own[i] = local_shape(src, tuple(shape), mesh)
            try:
                cut = gathered_axes(src, dst, sizes)
            except LookupError:
                self._moves[i] = Move(src, dst, mesh, tuple(shape), None)
                continue
            if cut is not None:
                key = tuple(a for a in sizes if a in cut[2])
                found.setdefault(key, []).append((i, cut[0], cut[1]))
        self._routes = tuple(self._route(axes, leaves, sizes) for axes, leaves in found.items())
        self.moving = tuple(sorted(s.index for route in self._routes for s in route.slots))

    def _route(self, axes: Axes, leaves: list[tuple[int, int, Axes]], sizes: dict[str, int]) -> _Route:
        stages, members = stages_of(self.mesh, axes, sizes, self.group)
        at, slots = coordinates(self.mesh), []
        for index, dim, keep in leaves:
            src, shape = self.srcs[index], self.shapes[index]
            assert src is not None
            assert shape is not None
            slots.append(make_slot(index, src, dim, keep, shape, sizes=sizes, at=at, members=members))
        return _Route(stages, tuple(slots))

    def __call__(self, tensors: Sequence[Leaf]) -> list[Leaf]:
        """From rest to use, differentiably."""
        self._check(tensors)
        moved = apply_many(self._op(tensors), self._travelling(tensors)) if self.moving else ()
        return self._joined(tensors, moved)

    def depart(self, tensors: Sequence[Leaf], *, late: bool) -> tuple[Journey, Tensor]:
        """The first half of a call for leaves of which some are `moving`; see `usp.mesh.linear_late.depart`.

        `start()` of the journey sends them; it may be called inside anything that sees plain tensors.
        """
        self._check(tensors)
        return depart(self._op(tensors), self._travelling(tensors), late=late)

    def arrive(self, tensors: Sequence[Leaf], journey: Journey, number: Tensor) -> list[Leaf]:
        """The second half: what the call would have returned."""
        return self._joined(tensors, arrive(journey, number))

    def _op(self, tensors: Sequence[Leaf]) -> _Op:
        return _Op(self, tuple(None if t is None else t.dtype for t in tensors))

    def _travelling(self, tensors: Sequence[Leaf]) -> list[Tensor]:
        return [cast(Tensor, tensors[i]) for i in self.moving]

    def _joined(self, tensors: Sequence[Leaf], moved: Sequence[Tensor]) -> list[Leaf]:
        """All leaves in use, of which `moved` came together."""
        out = list(tensors)
        for i, t in enumerate(tensors):
            if t is not None and i not in self.moving:
                out[i] = self._cast(t)
        for i, move in self._moves.items():
            x = out[i]
            assert x is not None
            out[i] = redistribute(x, move.src, move.dst, self.mesh, shape=move.shape)
        for i, t in zip(self.moving, moved, strict=True):
            out[i] = t
        return out

    def start(self, tensors: Sequence[Leaf]) -> Pending:
        """From rest to use, under way when this returns. For plain tensors."""
        self._check(tensors)
        return self.gather(tensors)

    def gather(self, tensors: Sequence[Leaf]) -> Pending:
        """As `start`, unchecked; leaves may be left out, by every rank alike."""
        out, running = list(tensors), []
        for i, t in enumerate(tensors):
            if t is not None and i not in self.moving:
                out[i] = self._cast(t)
        for route in self._routes:
            present = [s for s in route.slots if tensors[s.index] is not None]
            for slots, dtype in alike(present, [self._wire(tensors[s.index]) for s in present]):
                shards = [cast(Tensor, tensors[s.index]) for s in slots]
                running.append(start_gather(route.stages, slots, shards, dtype))
        for i, move in self._moves.items():
            x = out[i]
            out[i] = None if x is None else move.run(x)

        def finish() -> list[Leaf]:
            for slots, pending in running:
                for slot, t in zip(slots, pending.wait(), strict=True):
                    out[slot.index] = t
            return out

        return Pending(finish)

    def start_transpose(self, grads: Sequence[Leaf], dtypes: Sequence[torch.dtype | None]) -> Pending:
        """Gradients in use to gradients at rest, summed, in the `dtypes` at rest. None: not wanted."""
        out, running = list(grads), []
        for route in self._routes:
            present = [s for s in route.slots if grads[s.index] is not None]
            for slots, dtype in alike(present, [_sum_dtype(grads[s.index]) for s in present]):
                whole = [cast(Tensor, grads[s.index]) for s in slots]
                running.append(start_scatter(route.stages, slots, whole, dtype))
                for slot in slots:
                    out[slot.index] = None  # not held here while it travels
        for i, move in self._moves.items():
            g = out[i]
            out[i] = None if g is None else move.transposed().run(g.to(_sum_dtype(g)))

        def finish() -> list[Leaf]:
            for slots, pending in running:
                for slot, t in zip(slots, pending.wait(), strict=True):
                    out[slot.index] = t
            return as_dtypes(out, dtypes)

        return Pending(finish)

    def slot_of(self, index: int) -> Slot:
        return next(s for route in self._routes for s in route.slots if s.index == index)

    def batched(self, size: int) -> Bundle:
        """The same bundle for leaves with one more, replicated, leading dimension (for vmap)."""

        def more(spec: P | None) -> P | None:
            return None if spec is None else P(None, *spec.dims, partial=spec.partial)

        shapes = [None if s is None else (size, *s) for s in self.shapes]
        srcs, dsts = [more(s) for s in self.srcs], [more(s) for s in self.dsts]
        return Bundle(srcs, dsts, self.mesh, shapes, self.dtype, self.group)

    def _wire(self, t: Leaf) -> torch.dtype:
        assert t is not None
        return self.dtype if self.dtype is not None and t.is_floating_point() else t.dtype

    def _cast(self, t: Tensor) -> Tensor:
        return t.to(self._wire(t))

    def _check(self, tensors: Sequence[Leaf]) -> None:
        if len(tensors) != len(self.srcs):
            raise ValueError(f"tensors={len(tensors)} must be one for each of the {len(self.srcs)} leaves.")
        for i, (t, own) in enumerate(zip(tensors, self._own, strict=True)):
            if (None if t is None else tuple(t.shape)) != own:
                got = None if t is None else tuple(t.shape)
                raise ValueError(
                    f"tensors[{i}]={got} must be this rank's shard {own} of {self.shapes[i]} at "
                    f"{self.srcs[i]}. Pass the global shape, or the src that it has."
                )


@dataclass(frozen=True)
class _Op:
    """The leaves that share collectives, as one linear map; `turned`: the way back."""

    bundle: Bundle
    dtypes: tuple[torch.dtype | None, ...]
    turned: bool = False

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self.start(tensors)()

    def start(self, tensors: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        bundle = self.bundle
        leaves: list[Leaf] = [None] * len(bundle.srcs)
        for i, t in zip(bundle.moving, tensors, strict=True):
            leaves[i] = t
        pending = bundle.start_transpose(leaves, self.dtypes) if self.turned else bundle.gather(leaves)

        def finish() -> tuple[Tensor, ...]:
            done = pending.wait()
            return tuple(cast(Tensor, done[i]) for i in bundle.moving)

        return finish

    def zeros(self, like: Tensor, index: int) -> Tensor:
        slot = self.bundle.slot_of(self.bundle.moving[index])
        return like.new_zeros(slot.full if self.turned else slot.own)

    def transposed(self) -> _Op:
        return _Op(self.bundle, self.dtypes, not self.turned)

    def batched(self, size: int) -> _Op:
        return _Op(self.bundle.batched(size), self.dtypes, self.turned)


def _sum_dtype(t: Leaf) -> torch.dtype:
    assert t is not None
    return sum_dtype(t.dtype)
