"""From a batch as Hugging Face collators make it to `Batch` and `Shard`.

Document boundaries are taken from what says so, never from the values of position_ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from usp import Batch, Shard, shard_batch
from usp.batch import IGNORE, WHOLE, checked, checked_ids, fill_rows
from usp.data import place_tokens, shifted
from usp.host import sent
from usp.mesh import MeshLike, Table, axis_sizes
from usp.models.hf.weights import WEIGHTS, checked_weights, target_weights

CU_SEQLENS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
# What collators add beside boundaries for one kernel's sake: it says nothing that the boundaries do not.
_DERIVED = ("max_length_q", "max_length_k", "seq_idx")
_TAKEN = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", *CU_SEQLENS, *_DERIVED)


def to_batch(inputs: Mapping[str, Any]) -> Batch:
    """The global `Batch` of a collated batch.

    input_ids [B, S]; labels [B, S], not shifted; attention_mask [B, S], padding on the right; cu_seqlens (or
    cu_seq_lens_q and _k): boundaries over the B rows laid end to end, every end of a row among them.
    Keys whose value is None do not count. Raises ValueError for a key that is not known, boundaries that
    disagree, and position_ids that restart where no boundary does.
    """
    given = {key: value for key, value in inputs.items() if value is not None}
    unknown = sorted(given.keys() - set(_TAKEN))
    if unknown or "input_ids" not in given:
        raise ValueError(
            f"inputs={sorted(given)} must hold input_ids, and of the rest only {', '.join(_TAKEN[1:])}; got "
            f"{unknown or 'no input_ids'}. Remove the others in the collator."
        )
    tokens = given["input_ids"].cpu()
    edges = _edges(given, tokens.shape)
    if edges is None and (derived := sorted(given.keys() & set(_DERIVED))):
        raise ValueError(
            f"{derived[0]} must come with boundaries, got inputs={sorted(given)}. Pass cu_seqlens "
            f"(collators: return_flash_attn_kwargs=True)."
        )
    valid = given.get("attention_mask")
    if valid is not None and valid.shape != tokens.shape:
        raise ValueError(
            f"attention_mask={tuple(valid.shape)} must mark padding, [B, S], got input_ids="
            f"{tuple(tokens.shape)}. Leave it out and pass cu_seqlens for documents."
        )
    if valid is not None and bool(((valid != 0) & (valid != 1)).any()):
        raise ValueError(
            f"attention_mask={valid.max().item()} must be 0 or 1, got another number. Documents that it "
            f"counts are not seen: pass them as cu_seqlens."
        )
    labels = given.get("labels")
    if labels is None:
        labels = torch.full_like(tokens, IGNORE)
    return Batch(tokens, labels, edges, None if valid is None else valid.cpu().bool())


class Weighted(NamedTuple):
    """One rank's shard, and the weights of its targets, [b, s] placed as `shard.labels`, if there are any."""

    shard: Shard
    weights: Tensor | None


def shard_inputs(
    inputs: Mapping[str, Any],
    *,
    table: Table,
    mesh: MeshLike,
    device: torch.device | str | None = None,
    num_valid: Tensor | float | None = None,
) -> Shard:
    """This rank's `Shard` of one collated global batch, the same on every rank. Does not communicate.

    As `to_batch`, and: shift_labels [B, S] are targets already shifted, used as they are instead of labels;
    position_ids [B, S] replace the positions counted from each document's start. Rows without targets are
    added where the ranks that share the rows do not divide their number. `num_valid`: targets of the whole
    step, where this batch is only a part of it. Inputs with loss_weights: `weighted_inputs`.
    """
    if inputs.get(WEIGHTS) is not None:
        raise ValueError(f"{WEIGHTS} must be cut with the tokens. Use weighted_inputs, which returns both.")
    return weighted_inputs(inputs, table=table, mesh=mesh, device=device, num_valid=num_valid).shard


def weighted_inputs(
    inputs: Mapping[str, Any],
    *,
    table: Table,
    mesh: MeshLike,
    device: torch.device | str | None = None,
    num_valid: Tensor | float | None = None,
) -> Weighted:
    """As `shard_inputs`, with this rank's part of loss_weights [B, S].

    They belong to the labels they are given with: not shifted beside labels, shifted beside shift_labels. The
    shard's `num_valid` is then the sum of the targets' weights.
    """
    batch = to_batch({**inputs, WEIGHTS: None})
    weights = checked_weights(inputs, tuple(batch.tokens.shape))
    num_rows = len(batch.tokens)
    batch = fill_rows(batch, math.prod(axis_sizes(mesh)[a] for a in table.tokens[0]))
    added = len(batch.tokens) - num_rows
    shard = shard_batch(batch, table=table, mesh=mesh, device=device)
    shape = torch.Size((num_rows, batch.tokens.shape[1]))
    targets, positions, count = _given_targets(inputs, shape), given_positions(inputs, shape), num_valid
    if targets is not None:
        targets = _add_rows(targets, added, IGNORE)
        count = int((targets != IGNORE).sum()) if count is None else count
        ids = 1 + max(int(batch.tokens.max()), int(targets.max()))
        shard = shard._replace(labels=_place(targets, IGNORE, shard, table, mesh), num_ids=ids)
    if positions is not None:
        rows = _add_rows(positions, added, 0)
        check_positions(rows, batch)
        shard = shard._replace(positions=_place(rows, 0, shard, table, mesh))
    if weights is not None:
        weights = _add_rows(weights, added, 0)
        weights = target_weights(
            weights, _shifted(batch) if targets is None else targets, shifted=targets is not None
        )
        count = float(weights.double().sum()) if num_valid is None else num_valid
        weights = _place(weights, 0, shard, table, mesh)
    if count is not None:
        count = torch.as_tensor(count, dtype=shard.num_valid.dtype)
        shard = shard._replace(num_valid=sent(count, shard.tokens.device))
    return Weighted(shard, weights)


def count_targets(inputs: Mapping[str, Any]) -> int:
    """Targets of a collated batch: labels that follow another token of their own document."""
    return int((_targets(inputs) != IGNORE).sum())


def total_weight(inputs: Mapping[str, Any]) -> float:
    """What a collated batch adds to the number that the loss is divided by: its targets, or their weights."""
    weights = checked_weights(inputs, tuple(inputs["input_ids"].shape))
    if weights is None:
        return count_targets(inputs)
    shifted = inputs.get("shift_labels") is not None
    return float(target_weights(weights, _targets(inputs), shifted=shifted).double().sum())


def _targets(inputs: Mapping[str, Any]) -> Tensor:
    """[B, S], shifted."""
    given = _given_targets(inputs, inputs["input_ids"].shape)
    return _shifted(to_batch({**inputs, WEIGHTS: None})) if given is None else given


def _given_targets(inputs: Mapping[str, Any], shape: torch.Size) -> Tensor | None:
    """shift_labels [B, S] on the CPU, where the caller has shifted."""
    given = inputs.get("shift_labels")
    return None if given is None else checked_ids("shift_labels", given, shape)


def given_positions(inputs: Mapping[str, Any], shape: torch.Size) -> Tensor | None:
    """position_ids [B, S] on the CPU; one row stands for all. ValueError for any other shape or type."""
    given = inputs.get("position_ids")
    if given is None:
        return None
    if given.shape not in (shape, (1, shape[1]), shape[1:]) or given.dtype not in WHOLE:
        raise ValueError(
            f"position_ids={tuple(given.shape)} {given.dtype} must be whole numbers, one for each of "
            f"input_ids={tuple(shape)}. Leave them out: positions are counted here."
        )
    rows: Tensor = given.cpu().long().expand(shape)
    return rows


def _shifted(batch: Batch) -> Tensor:
    _, labels, bounds = checked(batch)
    return shifted(labels, bounds)


def _edges(given: Mapping[str, Any], shape: torch.Size) -> list[list[int]] | None:
    """Boundaries of each row, from 0 to S."""
    named = {key: [int(edge) for edge in given[key]] for key in CU_SEQLENS if key in given}
    if not named:
        return None
    flat, *others = named.values()
    if any(other != flat for other in others):
        raise ValueError(f"{', '.join(named)} must agree, got {named}. Pass one of them.")
    num_rows, seq_len = shape
    ends = [row * seq_len for row in range(num_rows + 1)]
    if not set(ends) <= set(flat) or flat != sorted(set(flat)) or flat[-1] != ends[-1]:
        raise ValueError(
            f"{next(iter(named))} must rise from 0 to B * S through the end of every row, got B={num_rows}, "
            f"S={seq_len} and {flat[:3]}..{flat[-1:]}. Pass boundaries of the whole batch, not of one shard."
        )
    rows = []
    for start, stop in pairwise(ends):
        rows.append([edge - start for edge in flat if start <= edge <= stop])
    return rows


def check_positions(positions: Tensor, batch: Batch, step: int | None = None) -> None:
    """position_ids may start anywhere, but must not restart inside what is one document.

    `step`: by how much they must rise there, where nothing but documents and lengths is passed on.
    """
    bounds = batch.cu_seqlens or [[0, positions.shape[1]]] * positions.shape[0]
    kept = torch.ones_like(positions, dtype=torch.bool) if batch.valid is None else batch.valid
    for row, edges in enumerate(bounds):
        rise = positions[row].diff()
        for what, wrong in (
            ("restart", rise < 0),
            (f"rise by anything but {step}", rise != (rise if step is None else step)),
        ):
            places = (wrong & kept[row, 1:]).nonzero().flatten() + 1
            inside = sorted({int(at) for at in places} - {int(edge) for edge in edges})
            if inside:
                raise ValueError(
                    f"position_ids[{row}] must not {what} inside a document, got that at {inside[0]}. Pass "
                    f"cu_seqlens for packed documents (collators: return_flash_attn_kwargs=True); they are "
                    f"not guessed from positions."
                )


def _add_rows(x: Tensor, count: int, value: int) -> Tensor:
    return torch.cat([x, x.new_full((count, *x.shape[1:]), value)]) if count else x


def _place(x: Tensor, fill: int, shard: Shard, table: Table, mesh: MeshLike) -> Tensor:
    """[B, S] -> what `shard_batch` gives this rank of it."""
    return sent(place_tokens(x, fill, seq_len=shard.seq_len, table=table, mesh=mesh), shard.tokens.device)
