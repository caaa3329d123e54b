"""All chunks of a layer, forward and backward, below every torch.func level."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from usp import ring
from usp.head_chunks.deal import deal_chunks
from usp.head_chunks.job import Job, Projections
from usp.head_chunks.steps import Coming, Returning
from usp.heads import seq_lengths, trading_axis
from usp.kept import Kept
from usp.kernels import Kernel
from usp.mesh import MeshLike, Table, axis_sizes
from usp.ring import Ring
from usp.side import Side
from usp.spans import Mask


def chunked_attention(
    x: Tensor,
    weights: Any,
    make: Projections,
    *,
    num_heads: int,
    num_kv_heads: int,
    num_chunks: int,
    v_size: int,
    mask: Mask,
    place: Ring,
    kernel: Kernel,
    table: Table,
    mesh: MeshLike,
    seq_len: int,
    kept: Kept | None = None,
) -> Tensor:
    """x [B, S, D] at `table.attn_x` -> attention's output [B, S, N, Hv] placed likewise, chunk by chunk.

    Equal to `make`, `seq_to_heads`, `attention` and `heads_to_seq` one after the other. Each way over the
    axis that trades the sequence for heads: 1 all-to-all a chunk for q, 1 for each chunk that brings kv
    heads, 1 a chunk for the result; in the backward the first two twice, and what a ring sends once a chunk.
    First derivatives in reverse mode only. Gradients of x and of `weights`, a pytree, are summed over chunks
    in float32 or wider.
    """
    axis = trading_axis(table, mesh)
    parts = 1 if axis is None else axis_sizes(mesh)[axis]
    leaves, tree = pytree.tree_flatten(weights)
    job = Job(
        make=make,
        tree=tree,
        chunks=deal_chunks(num_heads, num_kv_heads, parts, num_chunks),
        group=num_heads // num_kv_heads,
        mask=mask,
        place=place,
        kernel=kernel,
        mesh=mesh,
        axis=axis,
        own_seq=() if axis is None else seq_lengths(table, mesh, axis, seq_len),
    )
    return cast(Tensor, _Chunked.apply(job, num_heads, v_size, kept, x, *leaves)[0])  # type: ignore[no-untyped-call]


class _Chunked(torch.autograd.Function):
    """Results: the output, then each chunk's output and log-sum-exp where attention ran."""

    @staticmethod
    def forward(
        job: Job, num_heads: int, v_size: int, kept: Kept | None, x: Tensor, *leaves: Any
    ) -> tuple[Tensor, ...]:
        weights = pytree.tree_unflatten(list(leaves), job.tree)
        record = Kept() if kept is None else kept
        side = Side(x.device)
        out = x.new_empty(*x.shape[:2], num_heads, v_size)
        coming = None if record.replaying else Coming(job, side, x, weights)
        saved: list[Tensor] = []
        for c in range(len(job.chunks)):

            def compute(c: int = c) -> tuple[Tensor, Tensor]:
                assert coming is not None
                return ring.forward(*coming.take(c), job.mask, job.place, job.kernel)

            o, lse = record.get(compute)
            with side.run(o):
                y = job.back(c, o)  # [B, S, N@ulysses, H] -> [B, S@ulysses, N, H]: 1 all-to-all
                for (a, b), (start, stop) in job.slots(c):
                    out[:, :, start:stop] = y[:, :, a:b]
            saved += [o.detach(), lse.detach()]
        side.join(out)
        return (out, *saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.job, _, _, _, x, *leaves = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.present = [t is not None for t in leaves]
        ctx.num_saved = len(output) - 1
        ctx.save_for_backward(*output[1:], x, *(t for t in leaves if t is not None))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if grads[0] is None:
            return (None,) * (5 + len(ctx.present))
        tensors = ctx.saved_tensors
        saved, x, rest = tensors[: ctx.num_saved], tensors[ctx.num_saved], iter(tensors[ctx.num_saved + 1 :])
        leaves = [next(rest) if there else None for there in ctx.present]
        found = _ChunkedBackward.apply(ctx.job, ctx.num_saved, grads[0], *saved, x, *leaves)  # type: ignore[no-untyped-call]
        return None, None, None, None, *found


class _ChunkedBackward(torch.autograd.Function):
    """The backward as a forward, with plain autograd through the projections and the exchanges."""

    @staticmethod
    def forward(job: Job, num_saved: int, d_out: Tensor, *tensors: Any) -> tuple[Tensor | None, ...]:
        saved, x, leaves = tensors[:num_saved], tensors[num_saved], tensors[num_saved + 1 :]
        side = Side(x.device)
        steps = Returning(job, side, d_out, x, list(leaves))
        for c in reversed(range(len(job.chunks))):
            q, k, v, do = steps.take(c)
            o, lse = saved[2 * c : 2 * c + 2]
            steps.give(c, ring.backward(do, q, k, v, o, lse, job.mask, job.place, job.kernel))
        return steps.result()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise RuntimeError("chunks of heads give first derivatives only. Use head_chunks=1 for higher ones.")
