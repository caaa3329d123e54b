"""One outcome for all ranks: what fails on one of them fails on every one, with the same message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from usp.mesh.devices import MeshLike

T = TypeVar("T")
Over = MeshLike | dist.ProcessGroup | None
"""A mesh or a process group, `dist.group.WORLD` for all ranks; None or plain sizes: this process alone."""


def agree(fn: Callable[[], T], over: Over) -> T:
    """Run `fn` on every rank; its result, or one error on all ranks that names those that failed.

    One exchange of short strings. `fn` should not communicate: a rank that fails before a collective leaves
    the others in it. Raises ValueError or OSError when all that failed did so, otherwise RuntimeError; the
    rank's own exception is the cause. A process alone sees its exception as it is.
    """
    failure: Exception | None = None
    values: list[T] = []
    try:
        values.append(fn())
    except Exception as error:
        failure = error
    report = None if failure is None else (_kind(failure), str(failure))
    reports = gather_objects((dist.get_rank() if dist.is_initialized() else 0, report), over)
    failed = {rank: report for rank, report in reports if report is not None}
    if not failed:
        return values[0]
    if failure is not None and len(reports) == 1:
        raise failure
    kinds = {kind for kind, _ in failed.values()}
    raise _raised(kinds)(_message(failed, len(reports))) from failure


def gather_objects(value: T, over: Over) -> list[T]:
    """`value` of every rank, in rank order, on every rank. A small picklable object."""
    held = [value]
    for group in _groups(over):
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, held, group=group)
        held = [each for part in parts for each in part]
    return held


def place(over: Over) -> tuple[int, int]:
    """(index of this rank, number of ranks), in the order of `gather_objects`."""
    index, size = 0, 1
    for group in _groups(over):
        index += group.rank() * size
        size *= group.size()
    return index, size


def _groups(over: Over) -> list[dist.ProcessGroup]:
    """Groups to gather over one after the other, innermost first, until every rank has been heard."""
    if isinstance(over, DeviceMesh):
        world = dist.group.WORLD
        if world is not None and over.size() == world.size():
            return _groups(world)
        return [over.get_group(axis) for axis in reversed(range(over.ndim)) if over.size(axis) > 1]
    return [over] if isinstance(over, dist.ProcessGroup) and over.size() > 1 else []


def _message(failed: dict[int, tuple[str, str]], num_ranks: int) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, (_, text) in failed.items():
        ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) > 1:
        ranks_of.pop("", None)  # ranks that failed with the others and have nothing to say
    if len(failed) == num_ranks and len(ranks_of) == 1:
        return next(iter(ranks_of))  # everyone's error: no rank to name
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in ranks_of.items()
    )


def _kind(error: Exception) -> str:
    return "ValueError" if isinstance(error, ValueError) else "OSError" if isinstance(error, OSError) else ""


def _raised(kinds: set[str]) -> type[Exception]:
    if kinds == {"ValueError"}:
        return ValueError
    return OSError if kinds == {"OSError"} else RuntimeError
