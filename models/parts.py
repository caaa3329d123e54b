"""The local parts of a layer, which communicate nothing: plain functions, and the same ones compiled.

Compiled, a norm, the rotation or the activation is fused into one pass over memory; the products around them
stay with the vendor's library. Compiled once for all layers, per model configuration and number of tokens
(from the second number on, for any).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from usp.head_chunks import Range
from usp.heads import wire
from usp.models.config import LlamaConfig
from usp.models.params import Block
from usp.models.rope import rope


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Normalised in float32 (float64 stays float64), scaled after the cast back, as Transformers does."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class Parts(NamedTuple):
    """x is [B, S, D]; w a layer's weights in use. q [B, S, N, H], k and v [B, S, K, H] of the heads in w."""

    norm: Callable[[Tensor, Tensor], Tensor]
    qkv: Callable[[Tensor, Block, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    norm_qkv: Callable[[Tensor, Tensor, Block, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    norm_qkv_wire: Callable[[Tensor, Tensor, Block, Tensor, Tensor, int], Tensor]
    """q, k and v as `usp.heads.wire` puts them for so many ranks, written by the kernel that rotates."""
    q: Callable[[Tensor, Block, Tensor, Tensor], Tensor]
    kv: Callable[[Tensor, Block, Tensor, Tensor], tuple[Tensor, Tensor]]
    act: Callable[[Tensor, Block], Tensor]
    """[B, S, D] -> [B, S, F]: silu(gate) * up."""
    norm_act: Callable[[Tensor, Tensor, Block], Tensor]
    mlp: Callable[[Tensor, Block], Tensor]
    """[T, D] -> [T, D]: the MLP without its last bias."""
    add_mlp: Callable[[Tensor, Block], Tensor]
    """[T, D] -> [T, D]: x plus the MLP of its norm."""


@lru_cache(maxsize=16)
def local_parts(cfg: LlamaConfig, compiled: bool) -> Parts:
    """The parts of this configuration's layers; `compiled`: each through torch.compile, at its first use."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, eps=cfg.rms_eps)

    def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(x, weight, bias)
        return y.view(*y.shape[:-1], y.shape[-1] // cfg.head_dim, cfg.head_dim)

    def q(x: Tensor, w: Block, cos: Tensor, sin: Tensor) -> Tensor:
        q_BSNH = project(x, w.wq, w.bq)
        return rope(norm(q_BSNH, w.q_norm) if cfg.qk_norm else q_BSNH, cos, sin)

    def kv(x: Tensor, w: Block, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k_BSKH = project(x, w.wk, w.bk)
        return rope(norm(k_BSKH, w.k_norm) if cfg.qk_norm else k_BSKH, cos, sin), project(x, w.wv, w.bv)

    def qkv(x: Tensor, w: Block, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q(x, w, cos, sin), *kv(x, w, cos, sin)

    def norm_qkv(
        x: Tensor, weight: Tensor, w: Block, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return qkv(norm(x, weight), w, cos, sin)

    def norm_qkv_wire(x: Tensor, weight: Tensor, w: Block, cos: Tensor, sin: Tensor, parts: int) -> Tensor:
        return wire(norm_qkv(x, weight, w, cos, sin), parts)

    def act(x: Tensor, w: Block) -> Tensor:
        return F.silu(F.linear(x, w.w_gate, w.b_gate)) * F.linear(x, w.w_up, w.b_up)

    def norm_act(x: Tensor, weight: Tensor, w: Block) -> Tensor:
        return act(norm(x, weight), w)

    def mlp(x: Tensor, w: Block) -> Tensor:
        return F.linear(act(x, w), w.w_down)

    def add_mlp(x: Tensor, w: Block) -> Tensor:
        return add_linear(x, norm_act(x, w.norm_mlp, w), w.w_down, w.b_down)

    parts = Parts(norm, qkv, norm_qkv, norm_qkv_wire, q, kv, act, norm_act, mlp, add_mlp)
    if not compiled:
        return parts
    logging.getLogger("usp").info("compiling the parts of a layer; the first step takes some seconds longer")
    return Parts(*cast(Any, [torch.compile(part, fullgraph=True) for part in parts]))


def head_rows(w: Block, q: Sequence[Range], kv: Sequence[Range], head_dim: int) -> Block:
    """w with the given ranges of heads only, one after the other."""

    def rows(t: Tensor | None, ranges: Sequence[Range]) -> Tensor | None:
        if t is None or not ranges:
            return None
        parts = [t[start * head_dim : stop * head_dim] for start, stop in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return w._replace(
        wq=rows(w.wq, q), bq=rows(w.bq, q),
        wk=rows(w.wk, kv), bk=rows(w.bk, kv), wv=rows(w.wv, kv), bv=rows(w.bv, kv),
    )  # fmt: skip


def add_linear(
    x_BSD: Tensor, y_BSF: Tensor, weight: Tensor, bias: Tensor | None, *, value: bool = True
) -> Tensor:
    """x + y @ weight.T + bias, the sum taken with the product. `value`: False where only gradients count."""
    if bias is not None:
        x_BSD = x_BSD + bias
    if value:
        flat = torch.addmm(x_BSD.flatten(0, -2), y_BSF.flatten(0, -2), weight.T)
        return flat.view(*x_BSD.shape[:-1], weight.shape[0])
    return cast(Tensor, _UnreadSum.apply(x_BSD, y_BSF, weight))  # type: ignore[no-untyped-call]


class _UnreadSum(torch.autograd.Function):
    """x + y @ weight.T for the gradient alone: nothing is computed, the value takes no memory."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor]:
        y, weight = ctx.saved_tensors
        grad = grads[0]
        return grad, grad @ weight, grad.flatten(0, -2).T @ y.flatten(0, -2)
