"""The scan that runs every block once and keeps its graph: first derivatives, nothing run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from usp.scan.handover import Handover, pull, receiving
from usp.scan.run import Leaf, Pending, Run, Wanted

Graph = tuple[Tensor, list[Any], Tensor]  # a block's input, its leaves in use, its result


def apply_stored(run: Run, x: Tensor, leaves: Sequence[Any], consts: Sequence[Any]) -> Tensor:
    needed = [isinstance(t, Tensor) and t.requires_grad for t in leaves]
    y = cast(Tensor, _Stored.apply(_Job(run, needed), len(leaves), x, *leaves, *consts))  # type: ignore[no-untyped-call]
    return receiving(y, run.arrived)


@dataclass
class _Job:
    run: Run
    needed: list[bool]  # leaves that a gradient may be asked for
    graphs: list[Graph] = field(default_factory=list)


class _Stored(torch.autograd.Function):
    """Below every torch.func level, on plain tensors, so that blocks may be compiled."""

    @staticmethod
    def forward(job: _Job, num_leaves: int, x: Tensor, *rest: Any) -> Tensor:
        run = job.run
        layers, consts = run.split(rest[:num_leaves]), rest[num_leaves:]
        weights, needed = run.ahead(layers, range(len(layers))), run.split(job.needed)
        for i in range(len(layers)):
            with torch.enable_grad():
                used = zip(next(weights), needed[i], strict=True)
                own = [t.detach().requires_grad_() if need else t for t, need in used]
                x_in = x.detach().requires_grad_()
                y = run.call(i, x_in, own, consts)
            job.graphs.append((x_in, own, y))
            x = y.detach()
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.job, ctx.num_leaves, _, *rest = inputs
        ctx.dtypes = [t.dtype if isinstance(t, Tensor) else None for t in rest]

    @staticmethod
    def backward(ctx: Any, *grads_out: Any) -> tuple[Any, ...]:
        want_x, *want = (bool(need) for need in ctx.needs_input_grad[2:])
        want = [w and d is not None and d.is_floating_point for w, d in zip(want, ctx.dtypes, strict=True)]
        none = (None,) * (3 + len(want))
        want = want[: ctx.num_leaves]
        if not (want_x or any(want)):
            return none
        wanted = Wanted(want_x, ctx.job.run.split(want))
        # an argument would be held until the last layer is done
        grad = None if ctx.job.run.arrived.grad is not None else grads_out[0]
        grads = _StoredBackward.apply(ctx.job, wanted, ctx.dtypes, grad)  # type: ignore[no-untyped-call]
        found = iter(grads)
        grad_x = next(found) if want_x else None
        consts = (None,) * (len(none) - 3 - len(want))
        return (None, None, grad_x, *(next(found) if w else None for w in want), *consts)


class _StoredBackward(torch.autograd.Function):
    """The backward as a forward: each block's graph is used and let go, gradients travel behind."""

    @staticmethod
    def forward(
        job: _Job, wanted: Wanted, dtypes: list[torch.dtype | None], grad: Tensor | None
    ) -> tuple[Tensor, ...]:
        run, graphs = job.run, job.graphs
        if not graphs:
            raise RuntimeError(
                "remat='none' keeps what one backward needs. Run the forward again, or use plain autograd."
            )
        at_rest = run.split(dtypes[: sum(run.num_leaves)])
        found: list[list[Leaf]] = [[None] * n for n in run.num_leaves]
        coming: tuple[int, Pending] | None = None
        handover = Handover(run.arrived.take() if grad is None else grad)
        for i in reversed(range(len(graphs))):
            x_in, own, y = graphs.pop()
            want = wanted.leaves[i]
            need_x = wanted.x or i > wanted.first()
            wrt = [x_in] * need_x + [t for t, w in zip(own, want, strict=True) if w]
            if i < wanted.first() or not wrt:
                continue
            grads = pull(y, wrt, handover)
            del y
            if need_x:
                handover = Handover(grads.pop(0))  # so that nothing here holds it
            mine: list[Leaf] = [grads.pop(0) if w else None for w in want]
            if run.gather is None:
                found[i] = mine
                continue
            if coming is not None:
                found[coming[0]] = coming[1].wait()
            rest = [d if w else None for d, w in zip(at_rest[i], want, strict=True)]
            coming = i, run.gather.start_transpose(mine, rest)
            del mine  # not held while the next layer is gone through
        if coming is not None:
            found[coming[0]] = coming[1].wait()
        leaves = [g for layer in found for g in layer if g is not None]
        return (handover.take(), *leaves) if wanted.x else tuple(leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise RuntimeError(
            "value_and_grad gives first derivatives only. Nest torch.func transforms for higher ones."
        )
