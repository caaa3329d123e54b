"""All chunks of a layer, forward and backward, below every torch.func level."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from usp import ring
from usp.head_chunks.deal import deal_chunks
from usp.head_chunks.job import Job
from usp.head_chunks.product import product
from usp.head_chunks.project import Projections
from usp.head_chunks.steps import Coming, Results, Returning
from usp.heads import seq_lengths, trading_axis
from usp.kept import Kept
from usp.kernels import Kernel
from usp.mesh import MeshLike, Table, axis_sizes, coordinates
from usp.mesh.devices import group_name
from usp.ring import Ring
from usp.spans import Mask


def chunked_attention(
    x: Tensor,
    weights: Any,
    wo: Tensor,
    make: Projections,
    *,
    num_heads: int,
    num_kv_heads: int,
    num_chunks: int,
    size: int,
    v_size: int,
    mask: Mask,
    place: Ring,
    kernel: Kernel,
    table: Table,
    mesh: MeshLike,
    seq_len: int,
    kept: Kept | None = None,
    plus: Tensor | None = None,
) -> Tensor:
    """x [B, S, D] at `table.attn_x` -> attention's output through wo [E, N * Hv], [B, S, E] placed likewise.

    Equal to `make`, `seq_to_heads`, `attention`, `heads_to_seq` and the product, one after the other; `plus`
    [B, S, E] is added in the product. Each way over the axis that trades the sequence for heads: 1 all-to-all
    a chunk for q, 1 for each chunk that brings kv heads, 1 a chunk for the result; in the backward the first
    two twice, and what a ring sends once a chunk. While a chunk's attention runs the next one's heads
    come and the last one's results go, and nothing of other chunks exists. Kept for the backward: x,
    attention's results and `weights`, a pytree. It sums the gradient of x in x's type, those of weights in
    float32 or wider. First derivatives in reverse mode only. There are no attention sinks here: a model that
    has them takes all heads at once, through `usp.attention`.
    """
    axis = trading_axis(table, mesh)
    parts = 1 if axis is None else axis_sizes(mesh)[axis]
    leaves, tree = pytree.tree_flatten(weights)
    job = Job(
        make=make,
        tree=tree,
        chunks=deal_chunks(num_heads, num_kv_heads, parts, num_chunks),
        share=num_heads // num_kv_heads,
        size=size,
        v_size=v_size,
        mask=mask,
        place=place,
        kernel=kernel,
        group=None if axis is None else group_name(mesh, axis),
        me=0 if axis is None else coordinates(mesh)[axis],
        rows=x.shape[0],
        own_seq=(x.shape[1],) if axis is None else seq_lengths(table, mesh, axis, seq_len),
    )
    found: Any = _Chunked.apply(job, num_heads, kept, x, wo, *leaves)  # type: ignore[no-untyped-call]
    promised, out = found[:2]
    return product(promised, cast(Tensor, out), wo, plus)


class _Chunked(torch.autograd.Function):
    """Results: the promised product, attention's output, then each chunk's output and log-sum-exp."""

    @staticmethod
    def forward(
        job: Job, num_heads: int, kept: Kept | None, x: Tensor, wo: Tensor, *leaves: Any
    ) -> tuple[Tensor, ...]:
        weights = pytree.tree_unflatten(list(leaves), job.tree)
        record = Kept() if kept is None else kept
        out = x.new_empty(*x.shape[:2], num_heads, job.v_size)
        results = Results(job, out)
        coming = None if record.replaying else Coming(job, x, weights)
        saved: list[Tensor] = []
        for c in range(len(job.chunks)):

            def compute(c: int = c) -> tuple[Tensor, Tensor]:
                assert coming is not None
                return ring.forward(*coming.take(c), job.mask, job.place, job.kernel)

            o, lse = record.get(compute)
            results.add(c, o)
            saved += [o.detach(), lse.detach()]
        results.finish()
        return (x.new_zeros(()).expand(*x.shape[:2], wo.shape[0]), out, *saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.job, _, kept, x, wo, *leaves = inputs
        ctx.last_use = None if kept is None else kept.last_use()
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.present = [t is not None for t in leaves]
        ctx.num_saved = len(output) - 2
        ctx.save_for_backward(*output[2:], x, wo, *(t for t in leaves if t is not None))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if grads[0] is None:
            return (None,) * (5 + len(ctx.present))
        saved, (x, wo, *rest) = ctx.saved_tensors[: ctx.num_saved], ctx.saved_tensors[ctx.num_saved :]
        present = iter(rest)
        leaves = [next(present) if there else None for there in ctx.present]
        found = _ChunkedBackward.apply(ctx.job, ctx.num_saved, grads[0], *saved, x, wo, *leaves)  # type: ignore[no-untyped-call]
        if ctx.last_use is not None:
            ctx.last_use()
        return None, None, None, found[0], None, *found[1:]


class _ChunkedBackward(torch.autograd.Function):
    """The backward as a forward, with plain autograd through what no product is."""

    @staticmethod
    def forward(job: Job, num_saved: int, d_z: Tensor, *tensors: Any) -> tuple[Tensor | None, ...]:
        saved, (x, wo, *leaves) = tensors[:num_saved], tensors[num_saved:]
        steps = Returning(job, d_z, wo, x, leaves)
        for c in reversed(range(len(job.chunks))):
            steps.give(c, *_pulled(job, steps, c, *saved[2 * c : 2 * c + 2]))
        return steps.result()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise RuntimeError("chunks of heads give first derivatives only. Use head_chunks=1 for higher ones.")


def _pulled(job: Job, steps: Returning, c: int, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A function of its own, so that its inputs are let go before the gradients travel."""
    do, q, k, v = steps.take(c)
    return ring.backward(do, q, k, v, o, lse, job.mask, job.place, job.kernel)
