"""The local parts of a layer, which communicate nothing: plain functions, and the same ones compiled.

Compiled, a norm, the rotation or the activation is fused into one pass over memory; the products around them
stay with the vendor's library. Compiled once for all layers, per model configuration and number of tokens
(from the second number on, for any).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from usp.heads import wire
from usp.models.config import LlamaConfig
from usp.models.params import Block
from usp.models.rope import rope
from usp.programs import own_programs
from usp.wire import can_wire, to_wire


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Normalised in float32 (float64 stays float64), scaled after the cast back, as Transformers does."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class Parts(NamedTuple):
    """x is [B, S, D]; w a layer's weights in use. q [B, S, N, H], k and v [B, S, K, H] of the heads in w."""

    norm: Callable[[Tensor, Tensor], Tensor]
    qkv: Callable[[Tensor, Block, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    norm_qkv: Callable[[Tensor, Tensor, Block, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    norm_qkv_wire: Callable[[Tensor, Tensor, Block, Tensor, Tensor, int], Tensor]
    """q, k and v as `usp.heads.wire` puts them for so many ranks, written by the kernel that rotates."""
    norm_project: Callable[[Tensor, Tensor, Block], tuple[Tensor, Tensor, Tensor]]
    """q and k not yet rotated, and v."""
    act: Callable[[Tensor, Block], Tensor]
    """[B, S, D] -> [B, S, F]: silu(gate) * up."""
    norm_act: Callable[[Tensor, Tensor, Block], Tensor]
    mlp: Callable[[Tensor, Block], Tensor]
    """[T, D] -> [T, D]: the MLP without its last bias."""


@lru_cache(maxsize=16)
def local_parts(cfg: LlamaConfig, compiled: bool) -> Parts:
    """The parts of this configuration's layers; `compiled`: each through torch.compile, at its first use."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, eps=cfg.rms_eps)

    def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(x, weight, bias)
        return y.view(*y.shape[:-1], y.shape[-1] // cfg.head_dim, cfg.head_dim)

    def flat_q(x: Tensor, w: Block) -> Tensor:
        q_BSNH = project(x, w.wq, w.bq)
        return norm(q_BSNH, w.q_norm) if cfg.qk_norm else q_BSNH

    def flat_k(x: Tensor, w: Block) -> Tensor:
        k_BSKH = project(x, w.wk, w.bk)
        return norm(k_BSKH, w.k_norm) if cfg.qk_norm else k_BSKH

    def qkv(x: Tensor, w: Block, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rope(flat_q(x, w), cos, sin), rope(flat_k(x, w), cos, sin), project(x, w.wv, w.bv)

    def norm_qkv(
        x: Tensor, weight: Tensor, w: Block, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return qkv(norm(x, weight), w, cos, sin)

    def norm_qkv_wire(x: Tensor, weight: Tensor, w: Block, cos: Tensor, sin: Tensor, parts: int) -> Tensor:
        return wire(norm_qkv(x, weight, w, cos, sin), parts)

    def norm_project(x: Tensor, weight: Tensor, w: Block) -> tuple[Tensor, Tensor, Tensor]:
        x = norm(x, weight)
        return flat_q(x, w), flat_k(x, w), project(x, w.wv, w.bv)

    def act(x: Tensor, w: Block) -> Tensor:
        return gated(F.linear(x, w.w_gate, w.b_gate), F.linear(x, w.w_up, w.b_up))

    def norm_act(x: Tensor, weight: Tensor, w: Block) -> Tensor:
        return act(norm(x, weight), w)

    def mlp(x: Tensor, w: Block) -> Tensor:
        return F.linear(act(x, w), w.w_down)

    parts = Parts(norm, qkv, norm_qkv, norm_qkv_wire, norm_project, act, norm_act, mlp)
    if not compiled:
        return parts
    logging.getLogger("usp").info("compiling the parts of a layer; the first step takes some seconds longer")
    return _with_own_wire(Parts(*(own_programs(part) for part in parts)))


def _with_own_wire(parts: Parts) -> Parts:
    """Rotated and wired by a kernel of our own where there is one."""

    def norm_qkv_wire(x: Tensor, weight: Tensor, w: Block, cos: Tensor, sin: Tensor, ranks: int) -> Tensor:
        if can_wire(x):
            return to_wire(parts.norm_project(x, weight, w), ranks, turn=(cos, sin))
        return parts.norm_qkv_wire(x, weight, w, cos, sin, ranks)

    return parts._replace(norm_qkv_wire=norm_qkv_wire)


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


def add_linear_of_parts(x_BSD: Tensor, y_BSPW: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `add_linear` for y [B, S, parts, W], whose last two dimensions are the features. In memory its
    gradient is [parts, S, B, W], as `usp.heads.heads_to_ranks` sends it. Not for vmap."""
    x_BSD = x_BSD if bias is None else x_BSD + bias
    return cast(Tensor, _SumOfParts.apply(x_BSD, y_BSPW, weight))  # type: ignore[no-untyped-call]


class _SumOfParts(torch.autograd.Function):
    """x + y @ weight.T; the product that makes y's gradient writes one block for each part."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return add_linear(x, y.flatten(-2), weight, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        (y, weight), (dx, dy, dw) = ctx.saved_tensors, tangents
        return add_linear(add_linear(dx, dy.flatten(-2), weight, None), y.flatten(-2), dw, None)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        y, weight = ctx.saved_tensors
        grad, (rows, length, parts, width) = grads[0], y.shape
        as_sent = grad.transpose(0, 1).reshape(1, rows * length, -1).expand(parts, -1, -1)
        blocks = torch.bmm(as_sent, weight.unflatten(1, (parts, width)).transpose(0, 1))
        d_y = blocks.view(parts, length, rows, width).permute(2, 1, 0, 3)
        d_weight = grad.flatten(0, -2).T @ y.flatten(0, 1).flatten(1) if ctx.needs_input_grad[2] else None
        return grad, d_y, d_weight


class _UnreadSum(torch.autograd.Function):
    """x + y @ weight.T for the gradient alone: nothing is computed, the value takes no memory."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        y, weight = ctx.saved_tensors
        grad = grads[0]
        d_weight = grad.flatten(0, -2).T @ y.flatten(0, -2) if ctx.needs_input_grad[2] else None
        return grad, grad @ weight, d_weight
