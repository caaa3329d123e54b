"""Kernel "flash4": flash-attn 4, the package `flash-attn-4`, for Hopper and Blackwell.

FlashAttention (arXiv 2205.14135) in CuTe DSL. The package is imported when it is first asked for, and
compiles each kind of call when that first comes. Two operators wrap it: torch.compile does not look inside.
"""

from __future__ import annotations

import importlib
import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from usp.columns import like_columns
from usp.kernels.interface import PACKED, SOFTCAP, WINDOW, Kernel, Segments
from usp.kernels.rows import batched, bounds, lse_batched, lse_flat, num_batch

_log = logging.getLogger("usp")


@lru_cache(maxsize=1)
def _package() -> Any:
    """flash_attn.cute.interface, or None: not installed, or it cannot be imported here."""
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("flash_attn"):
            _log.warning("flash-attn 4 is installed but lacks %s, and is not used", error.name)
    except Exception as error:  # whatever its compiler's libraries raise: then another kernel is used
        _log.warning("flash-attn 4 is installed but cannot be imported (%s), and is not used", error)
    return None


def _available(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in (9, 10) and _package() is not None


@lru_cache(maxsize=1)
def _announce() -> None:
    _log.info("flash-attn 4 compiles each kind of call when it first comes: some seconds each")


def _options(segments: Segments) -> dict[str, Any]:
    """Its masks are aligned at the end, like ours."""
    left, right = segments.left, segments.right
    causal = left is None and right == 0
    return {
        "softmax_scale": segments.scale,
        "softcap": segments.softcap,
        "causal": causal,
        "window_size_left": left,
        "window_size_right": None if causal else right,
    }


def _readable(t: Tensor) -> Tensor:
    """t, or a copy where its kernels could not read it: whole heads in a row, every row at 16 bytes."""
    rows = all(stride and stride * t.itemsize % 16 == 0 for stride in t.stride()[:-1])
    return t if t.stride(-1) == 1 and rows and t.data_ptr() % 16 == 0 else t.contiguous()


def _boundaries(segments: Segments, device: torch.device) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, bounds(segments, device), strict=True))


@torch.library.custom_op("usp::flash4_forward", mutates_args=())
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: list[int],
    cu_k: list[int],
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    _announce()
    segments = Segments(tuple(cu_q), tuple(cu_k), left, right, scale, softcap)
    run, options, batch = _package()._flash_attn_fwd, _options(segments), num_batch(segments)
    if batch is None:
        o, lse, *_ = run(q, k, v, return_lse=True, **_boundaries(segments, q.device), **options)
        return o, lse  # [T, N, H], [N, T]
    x = (batched(t, batch) for t in (q, k, v))
    o, lse, *_ = run(*x, return_lse=True, **options)
    return o.flatten(0, 1), lse_flat(lse)


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows, num_heads, _ = q.shape
    return q.new_empty(rows, num_heads, v.shape[2]), q.new_empty(num_heads, rows, dtype=torch.float32)


@torch.library.custom_op("usp::flash4_backward", mutates_args=("dq", "dk", "dv"))
def _backward_op(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_q: list[int],
    cu_k: list[int],
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float,
) -> None:
    segments = Segments(tuple(cu_q), tuple(cu_k), left, right, scale, softcap)
    run, options, batch = _package()._flash_attn_bwd, _options(segments), num_batch(segments)
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    x, grads = [_readable(t) for t in (q, k, v, o, do)], [dq, dk, dv]
    # q, k, v and their gradients may be columns of what one all-to-all brings, and of what one sends
    if batch is None:
        lse, more = lse.contiguous(), _boundaries(segments, q.device)
    else:
        x, grads = ([batched(t, batch) for t in ts] for ts in (x, grads))
        lse, more = lse_batched(lse, batch), {}
    run(*x, lse, **more, **options, **dict(zip(("dq", "dk", "dv"), grads, strict=True)))


def _forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    o, lse = _forward_op(q, k, v, list(segments.cu_q), list(segments.cu_k), *segments[2:])
    return o, lse


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = like_columns([q, k, v])
    bounds_q, bounds_k = list(segments.cu_q), list(segments.cu_k)
    _backward_op(dq, dk, dv, do, q, k, v, o, lse, bounds_q, bounds_k, *segments[2:])
    return dq, dk, dv


FLASH4 = Kernel(
    "flash4",
    ("cuda",),
    (torch.bfloat16, torch.float16),
    frozenset({PACKED, WINDOW, SOFTCAP}),
    # a size of its own for v: forward only where query heads share kv heads, so it is padded
    # only the sizes that the tests compare on the device: at 80 its gradient of q was seen to be wrong
    lambda size, v_size: size == v_size and size in (64, 128, 256),
    _forward,
    _backward,
    _available,
)
