"""`plan`: the cheapest list of collectives and local steps that moves a tensor between two placements."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count

import torch

from usp.mesh.collectives import sum_dtype
from usp.mesh.devices import MeshLike
from usp.mesh.spec import Axes, P, check_spec

REDUCES = ("reduce_scatter", "all_reduce")
COMMUNICATES = ("all_to_all", "all_gather", *REDUCES)


@dataclass(frozen=True)
class Step:
    """One move over one axis. `before` and `after` are the placements around it.

    kinds: all_to_all (dim -> to_dim), all_gather (dim), reduce_scatter (partial -> to_dim), all_reduce,
    slice (replicated -> to_dim), and two local ways to a pending sum: mask (replicated) and pad (from dim).
    `nbytes` is what one rank sends: with n bytes held by the rank that holds most, and k ranks on the axis,
    n (k-1)/k for all_to_all and reduce_scatter, n (k-1) for all_gather, 2 n (k-1)/k for all_reduce.
    """

    kind: str
    axis: str
    dim: int | None
    to_dim: int | None
    before: P
    after: P
    nbytes: int

    def describe(self, sizes: Mapping[str, int]) -> str:
        where = {
            "all_to_all": f"dim {self.dim} -> dim {self.to_dim}",
            "all_gather": f"dim {self.dim}",
            "reduce_scatter": f"sum -> dim {self.to_dim}",
            "all_reduce": "sum",
            "slice": f"dim {self.to_dim}",
            "mask": "copy kept at coordinate 0, zeros elsewhere",
            "pad": f"dim {self.dim}, zeros around the own shard",
        }[self.kind]
        sent = f"{_human(self.nbytes)} sent per rank" if self.kind in COMMUNICATES else "local"
        over = f"over {self.axis} ({sizes[self.axis]} ranks)"
        return f"{self.kind:<14} {over:<24} {where:<24} {sent:<26} {self.before} -> {self.after}"


@dataclass(frozen=True)
class Plan:
    """What `redistribute` will do. `print(plan)` explains it; `nbytes` is what one rank sends in all."""

    src: P
    dst: P
    shape: tuple[int, ...]
    dtype: torch.dtype
    sizes: Mapping[str, int]
    steps: tuple[Step, ...]

    @property
    def nbytes(self) -> int:
        return sum(step.nbytes for step in self.steps)

    @property
    def collectives(self) -> tuple[str, ...]:
        """Kinds of the communicating steps, in order."""
        return tuple(s.kind for s in self.steps if s.kind in COMMUNICATES)

    def __str__(self) -> str:
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())
        dtype = str(self.dtype).removeprefix("torch.")
        head = f"{list(self.shape)} {dtype} on {mesh}: {self.src} -> {self.dst}"
        if not self.steps:
            return f"{head}\n  nothing to do: every rank already holds its part"
        lines = [f"  {i}. {step.describe(self.sizes)}" for i, step in enumerate(self.steps, 1)]
        return "\n".join([head, *lines, f"  total: {_human(self.nbytes)} sent per rank"])


def plan(
    src: P,
    dst: P,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    mesh: MeshLike,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> Plan:
    """Compile the move of a tensor of global `shape` from `src` to `dst`; least bytes, then fewest steps.

    `mesh` is a DeviceMesh or a mapping such as {"dp": 1, "ring": 2, "ulysses": 4}; it needs no process group.
    The steps depend on the placements and the mesh alone, so all ranks agree at every length; `shape` and
    `dtype` give the bytes (from the first sum to the last, those of `reduce_dtype` or at least float32).
    Raises ValueError when a spec does not fit the mesh or the shape.
    """
    sizes = check_spec(src, mesh, len(shape), "src")
    check_spec(dst, mesh, len(shape), "dst")
    found = find_steps(src, dst, tuple(sizes.items()))
    sums = [i for i, step in enumerate(found) if step.kind in REDUCES]
    wide = sum_dtype(dtype, reduce_dtype)
    steps = []
    for i, step in enumerate(found):
        itemsize = (wide if sums and sums[0] <= i <= sums[-1] else dtype).itemsize
        nbytes = _sent(step.kind, step.axis, step.before.dims, shape, itemsize, sizes)
        steps.append(replace(step, nbytes=nbytes))
    return Plan(src, dst, tuple(shape), dtype, sizes, tuple(steps))


State = tuple[tuple[Axes, ...], Axes]  # axes of each dimension; pending sums


@lru_cache(maxsize=4096)
def find_steps(src: P, dst: P, mesh: tuple[tuple[str, int], ...]) -> tuple[Step, ...]:
    """Cheapest path from `src` to `dst` (Dijkstra over placements; axes of size 1 take no part).

    Costs are those of a tensor that every placement cuts evenly.
    """
    sizes = dict(mesh)
    shape = (math.prod(sizes.values()),) * len(src)
    start, goal = _state(src, sizes), _state(dst, sizes)
    order = count()  # equal costs keep the order in which they were found
    queue: list[tuple[int, int, int, State, tuple[Step, ...]]] = [(0, 0, next(order), start, ())]
    done: set[State] = set()
    while queue:
        cost, num_steps, _, state, path = heapq.heappop(queue)
        if state == goal:
            return path
        if state in done:
            continue
        done.add(state)
        for kind, axis, dim, to, new in _moves(state, goal, sizes):
            if new not in done:
                before, after = (P(*dims, partial=partial) for dims, partial in (state, new))
                step = Step(kind, axis, dim, to, before, after, 0)
                total = cost + _sent(kind, axis, state[0], shape, 1, sizes)
                heapq.heappush(queue, (total, num_steps + 1, next(order), new, (*path, step)))
    raise AssertionError(f"no path from {src} to {dst}")


def _state(spec: P, sizes: Mapping[str, int]) -> State:
    def keep(axes: Axes) -> Axes:
        return tuple(a for a in axes if sizes[a] > 1)

    return tuple(keep(axes) for axes in spec.dims), keep(spec.partial)


def _moves(
    state: State, goal: State, sizes: Mapping[str, int]
) -> Iterator[tuple[str, str, int | None, int | None, State]]:
    """Every single step from `state`: kind, axis, dim, to_dim and where it leads.

    Only the innermost axis of a dimension can move, and only an axis that the goal wants cut is cut: no
    detour over a dimension whose size nobody vouched for.
    """
    dims, partial = state

    def put(base: tuple[Axes, ...], dim: int, axis: str) -> tuple[Axes, ...]:
        return tuple((*axes, axis) if i == dim else axes for i, axes in enumerate(base))

    everywhere = range(len(dims))
    wanted = {a for axes in goal[0] for a in axes}
    for dim, axes in enumerate(dims):
        if not axes:
            continue
        axis = axes[-1]
        without = tuple(a[:-1] if i == dim else a for i, a in enumerate(dims))
        yield "all_gather", axis, dim, None, (without, partial)
        for to in everywhere:
            if to != dim:
                yield "all_to_all", axis, dim, to, (put(without, to, axis), partial)
        if axis in goal[1]:
            yield "pad", axis, dim, None, (without, tuple(sorted((*partial, axis))))
    for axis in partial:
        rest = tuple(a for a in partial if a != axis)
        yield "all_reduce", axis, None, None, (dims, rest)
        for to in everywhere if axis in wanted else ():
            yield "reduce_scatter", axis, None, to, (put(dims, to, axis), rest)
    used = {a for axes in dims for a in axes} | set(partial)
    for axis in (a for a in sizes if a in wanted - used):
        for to in everywhere:
            yield "slice", axis, None, to, (put(dims, to, axis), partial)
    for axis in (a for a in goal[1] if a not in used):
        yield "mask", axis, None, None, (dims, tuple(sorted((*partial, axis))))


def _sent(
    kind: str,
    axis: str,
    dims: tuple[Axes, ...],
    shape: tuple[int, ...],
    itemsize: int,
    sizes: Mapping[str, int],
) -> int:
    """Bytes that one rank sends in a step that starts at `dims`, rounded up; see `Step.nbytes`."""
    if kind not in COMMUNICATES:
        return 0
    nbytes, k = itemsize, sizes[axis]
    for n, axes in zip(shape, dims, strict=True):
        for a in axes:
            n = -(-n // sizes[a])
        nbytes *= n
    times = {"all_gather": k, "all_to_all": 1, "reduce_scatter": 1, "all_reduce": 2}[kind]
    return -(-times * nbytes * (k - 1) // k)


def _human(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
