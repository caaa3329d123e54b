"""Attention on local shards, placed as the table says: whole sequences, or a ring over what is left cut."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from torch import Tensor

from usp import kernels, ring
from usp.kept import Kept
from usp.kernels import Kernel
from usp.mesh import MeshLike, Table
from usp.reference import reference
from usp.ring import Ring
from usp.setting import check_inputs, mask_of, ring_of
from usp.spans import Mask, features


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    table: Table | None = None,
    mesh: MeshLike | None = None,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    exchange: Literal["auto", "p2p", "gather"] = "auto",
    kept: Kept | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v within documents, on this rank's heads and its part of the sequence.

    q [B, S, N, H], k [B, S, K, H], v [B, S, K, Hv], N a multiple of K; result [B, S, N, Hv]. Without `table`
    and `mesh` S is whole. With them q is placed by `table.q`: where that leaves the sequence sharded, this is
    a ring over that axis, S being the two pieces that `shard_batch` dealt to this rank (`usp.order`).

    `cu_seqlens`, int32 on the CPU, are document boundaries over the B rows of whole sequences laid end to
    end, every end of a row among them; None: one document a row. `window`: a query sees keys less than that
    many positions away, itself included, on both sides unless causal. `sinks` [N], of this rank's heads: the
    score of one more key for each, which has no value. `softcap`: scores become
    softcap * tanh(score / softcap). `scale`: 1 / sqrt(H) unless given.

    `kernel`: a name of `usp.kernels.KERNELS`, "reference" (plain torch, any order of derivative, forward mode
    too) or "auto", the first that takes the input. Kernels but the reference give first derivatives in
    reverse mode only. `exchange`: how a ring over one axis gets at the keys: "p2p" sends them around it,
    behind the computation, "gather" fetches all at once; "auto" gathers where that needs no more room than q
    and o (degree * K <= N). `kept`: see `usp.scan`; the reference keeps nothing.

    Communicates nothing without a ring; with "p2p" k and v degree - 1 times each way and their gradients
    degree times in float32; with "gather" 1 all-gather each way and 1 reduce-scatter. Raises ValueError for
    shapes, boundaries or options that do not fit, before any communication.
    """
    check_inputs(q, k, v, sinks)
    place = ring_of(q.shape[1], q.shape[2], k.shape[2], table, mesh, exchange)
    mask = mask_of(
        q.shape[0], q.shape[1] * place.degree, place.degree, cu_seqlens=cu_seqlens, causal=causal,
        window=window, softcap=softcap, scale=1 / math.sqrt(q.shape[3]) if scale is None else scale,
    )  # fmt: skip
    if kernel == "reference":
        if exchange != "auto":
            raise ValueError(
                f"exchange={exchange!r} must be auto with kernel='reference', which always gathers. "
                f"Leave one out."
            )
        return reference(q, k, v, sinks, mask, table=table, mesh=mesh)
    chosen = kernels.choose(
        kernel, device=q.device, dtype=q.dtype, size=q.shape[3], v_size=v.shape[3], features=features(mask)
    )
    return cast(Tensor, _Attention.apply(q, k, v, sinks, mask, place, chosen, kept)[0])  # type: ignore[no-untyped-call]


def knows_result(kept: Kept, kernel: str) -> bool:
    """Whether the attention that comes next takes its result from `kept`: q, k, v are for its gradient."""
    return kept.replaying and kernel != "reference"


def kept_result(kept: Kept, *, again: bool) -> Tensor:
    """That result, now; `again`: for the attention that comes next as well."""
    found = kept.ahead() if again else kept.get(_kept)
    return cast(Tensor, found[0])


def _kept() -> tuple[Tensor, Tensor]:
    raise AssertionError("what is kept is not computed")


class _Attention(torch.autograd.Function):
    """A kernel's runs and their explicit backward. Results: output [B, S, N, Hv], log-sum-exp [N, B * S]."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mask: Mask,
        place: Ring,
        kernel: Kernel,
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor]:
        def compute() -> tuple[Tensor, Tensor]:
            o, lse = ring.forward(q, k, v, mask, place, kernel)
            return (o, lse) if sinks is None else _with_sinks(o, lse, sinks)

        if kept is None:
            return compute()
        o, lse = kept.get(compute)
        return o.detach(), lse.detach()  # other tensors than the kept ones, which stay without a history

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, sinks, ctx.mask, ctx.place, ctx.kernel, kept = inputs
        ctx.last_use = None if kept is None else kept.last_use()
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros for gradients of what only the backward reads
        ctx.save_for_backward(q, k, v, sinks, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if grads[0] is None:
            return (None,) * 8
        q, k, v, sinks, o, lse = ctx.saved_tensors
        args = (grads[0], q, k, v, sinks, o, lse, ctx.mask, ctx.place, ctx.kernel)
        dq, dk, dv, *d_sinks = _AttentionBackward.apply(*args)  # type: ignore[no-untyped-call]
        if ctx.last_use is not None:
            ctx.last_use()
        return dq, dk, dv, d_sinks[0] if d_sinks else None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """Fold the mapped dimension into the batch."""
        size, (sinks, mask, place, kernel, _) = info.batch_size, args[3:]
        if in_dims[3] is not None:
            raise NotImplementedError('vmap over sinks needs attention(..., kernel="reference").')
        q, k, v = (_leading(t, d, size).flatten(0, 1) for t, d in zip(args[:3], in_dims[:3], strict=True))
        out = _Attention.apply(q, k, v, sinks, mask.repeated(size), place, kernel, None)  # type: ignore[no-untyped-call]
        return (out[0].unflatten(0, (size, -1)), out[1]), (0, None)


class _AttentionBackward(torch.autograd.Function):
    """No *args in `forward`: torch.compile counts its parameters."""

    @staticmethod
    def forward(
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        o: Tensor,
        lse: Tensor,
        mask: Mask,
        place: Ring,
        kernel: Kernel,
    ) -> tuple[Tensor, ...]:
        grads = ring.backward(do, q, k, v, o, lse, mask, place, kernel)
        if sinks is None:
            return grads
        # a sink is a key whose value is zero: its gradient is minus its probability times do . o
        probability = torch.exp(sinks.to(lse.dtype).unsqueeze(1) - lse)
        dot = (do.to(lse.dtype) * o.to(lse.dtype)).sum(3).flatten(0, 1).t()
        return (*grads, -(probability * dot).sum(1).to(sinks.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise RuntimeError(
            'this kernel gives first derivatives only. Use attention(..., kernel="reference").'
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        size, sinks, lse, (mask, place, kernel) = info.batch_size, args[4], args[6], args[7:]
        whole = [_leading(args[i], in_dims[i], size) for i in (0, 1, 2, 3, 5)]
        if in_dims[5] is not None and sinks is None:  # o was mapped: the forward was folded, and lse with it
            do, q, k, v, o = (t.flatten(0, 1) for t in whole)
            grads = _AttentionBackward.apply(do, q, k, v, None, o, lse, mask.repeated(size), place, kernel)  # type: ignore[no-untyped-call]
            return tuple(g.unflatten(0, (size, -1)) for g in grads), (0, 0, 0)
        if in_dims[5] is not None:
            lse = lse.view(lse.shape[0], size, -1).unbind(1)
        each = []
        for i in range(size):
            do, q, k, v, o = (t[i] for t in whole)
            mine = lse if isinstance(lse, Tensor) else lse[i]
            each.append(_AttentionBackward.apply(do, q, k, v, sinks, o, mine, mask, place, kernel))  # type: ignore[no-untyped-call]
        return tuple(torch.stack(g) for g in zip(*each, strict=True)), (0,) * len(each[0])


def _with_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """One more key for each head, with score `sinks` [N] and value zero."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(1))
    share = torch.exp(lse - total).t().reshape(*o.shape[:3], 1)
    return (o * share).to(o.dtype), total


def _leading(t: Tensor, dim: int | None, size: int) -> Tensor:
    """The mapped dimension of `t` in front; an unmapped tensor is repeated."""
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
