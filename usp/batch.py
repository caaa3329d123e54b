"""A global batch, and every rule about what may be in one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORE = -100  # the label of a token that is no target
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Batch(NamedTuple):
    """A global batch, the same on every rank, on any device.

    tokens [B, S], whole numbers. labels [B, S], NOT shifted, -100 where a token is no target; None: the
    tokens. cu_seqlens: for each of the B rows its document boundaries, from 0 to S; None: one document a row.
    valid [B, S] bool, or 0 and 1: False on padding, which must end a row; None: no padding.
    """

    tokens: Tensor
    labels: Tensor | None = None
    cu_seqlens: Sequence[Sequence[int] | Tensor] | None = None
    valid: Tensor | None = None


def checked(batch: Batch) -> tuple[Tensor, Tensor, list[list[int]]]:
    """int64 tokens, labels and document boundaries on the CPU, padding made a document without targets."""
    given: Any = batch.tokens
    if not isinstance(given, Tensor) or given.dim() != 2 or given.dtype not in WHOLE or 0 in given.shape:
        raise ValueError(
            f"tokens={_kind(given)} must be whole numbers [B, S] with B and S at least 1. Stack the rows, "
            f"and leave out empty ones."
        )
    tokens = checked_ids("tokens", batch.tokens, batch.tokens.shape)
    labels = tokens if batch.labels is None else checked_ids("labels", batch.labels, tokens.shape)
    num_rows, seq_len = tokens.shape
    bounds = [[0, seq_len] for _ in range(num_rows)]
    if batch.cu_seqlens is not None:
        bounds = _bounds(batch.cu_seqlens, num_rows, seq_len)
    if batch.valid is not None:
        labels, bounds = _without_padding(_mask(batch.valid, tokens.shape), labels, bounds)
    return tokens, labels, bounds


def fill_rows(batch: Batch, multiple: int) -> Batch:
    """`batch` with rows that have no label, up to a multiple of `multiple` rows."""
    num_rows, seq_len = batch.tokens.shape
    extra = -num_rows % multiple
    if not extra:
        return batch
    tokens = torch.cat([batch.tokens, batch.tokens.new_zeros(extra, seq_len)])
    labels = batch.tokens if batch.labels is None else batch.labels
    bounds = batch.cu_seqlens
    valid = torch.ones(num_rows, seq_len, dtype=torch.bool) if batch.valid is None else batch.valid
    return Batch(
        tokens=tokens,
        labels=torch.cat([labels, labels.new_full((extra, seq_len), IGNORE)]),
        cu_seqlens=None if bounds is None else [*bounds, *([0, seq_len] for _ in range(extra))],
        valid=torch.cat([valid, valid.new_zeros(extra, seq_len)]),
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return type(value).__name__


def checked_ids(name: str, value: Any, shape: torch.Size) -> Tensor:
    """`value` as int64 on the CPU. ValueError unless it has one whole number for each token, 0 or more, or,
    but for tokens, -100."""
    if not isinstance(value, Tensor) or value.shape != shape or value.dtype not in WHOLE:
        shifted = " (labels not shifted)" if name == "labels" else ""
        raise ValueError(
            f"{name}={_kind(value)} must be whole numbers in the shape of tokens, got tokens={tuple(shape)}. "
            f"Pass one entry per token{shifted}."
        )
    ids = value.cpu().long()
    smallest = int((ids if name == "tokens" else ids.where(ids != IGNORE, 0)).min())
    if smallest < 0:
        what = "0 or more" if name == "tokens" else f"0 or more, or {IGNORE} for one that does not count"
        raise ValueError(f"{name}={smallest} must be {what}, got it in the batch. Correct the batch.")
    return ids


def _bounds(given: Any, num_rows: int, seq_len: int) -> list[list[int]]:
    """Each row's boundaries as host integers, from 0 to S."""
    flat = not hasattr(given, "__len__") or (isinstance(given, Tensor) and given.dim() != 2)
    if flat or len(given) != num_rows:
        got = _kind(given) if flat else f"{len(given)}"
        raise ValueError(
            f"cu_seqlens must have one entry per row, got {got} for B={num_rows}. Give a list with the "
            f"boundaries of every row."
        )
    return [_row_bounds(row, edges, seq_len) for row, edges in enumerate(given)]


def _row_bounds(row: int, given: Any, seq_len: int) -> list[int]:
    values = given.tolist() if hasattr(given, "tolist") else given
    edges = list(values) if isinstance(values, Sequence) else [values]
    whole = isinstance(values, Sequence) and all(type(edge) is int or _is_whole(edge) for edge in edges)
    edges = [int(edge) for edge in edges] if whole else edges
    rising = whole and len(edges) > 1 and all(a < b for a, b in pairwise(edges))
    if not rising or edges[0] != 0 or edges[-1] != seq_len:
        raise ValueError(
            f"cu_seqlens[{row}]={_short(edges)} must be whole numbers that rise from 0 to S, got S="
            f"{seq_len}. Give each row's document boundaries over the whole sequence."
        )
    return edges


def _is_whole(value: Any) -> bool:
    """Of numpy's and torch's kinds too; not of floats, which would be cut."""
    kind = value.dtype in WHOLE if isinstance(value, Tensor) else hasattr(value, "__index__")
    return bool(kind) and not isinstance(value, bool)


def _short(edges: list[Any]) -> str:
    return str(edges) if len(edges) <= 8 else f"[{', '.join(map(str, edges[:4]))}, ..., {edges[-1]}]"


def _mask(value: Any, shape: torch.Size) -> Tensor:
    """True on tokens, False on padding."""
    kinds = (torch.bool, *WHOLE)
    if not isinstance(value, Tensor) or value.shape != shape or value.dtype not in kinds:
        raise ValueError(
            f"valid={_kind(value)} must be bool in the shape of tokens, got tokens={tuple(shape)}. Pass one "
            f"entry per token."
        )
    host = value.cpu()
    if host.dtype != torch.bool and bool(((host != 0) & (host != 1)).any()):
        raise ValueError(
            f"valid={int(host.max())} must be 0 or 1, got another number. Give documents as cu_seqlens."
        )
    return host.bool()


def _without_padding(
    valid: Tensor, labels: Tensor, bounds: list[list[int]]
) -> tuple[Tensor, list[list[int]]]:
    """Labels without padding, and boundaries at which the padding of a row is one document."""
    seq_len = valid.shape[1]
    lengths = valid.sum(1)
    if not torch.equal(valid, torch.arange(seq_len) < lengths.unsqueeze(1)):
        raise ValueError(
            "valid must be True, then False, along each row, got padding before tokens. Pad on the right."
        )
    cut = []
    for edges, length in zip(bounds, lengths.tolist(), strict=True):
        inside = [edge for edge in edges if edge < length]
        cut.append([*inside, *dict.fromkeys((length, seq_len))] if length else [0, seq_len])
    return labels.where(valid, IGNORE), cut
