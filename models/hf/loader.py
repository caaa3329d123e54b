"""Data loaders that give every rank the same global batch, collated as each dp group collates its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from usp.batch import IGNORE
from usp.mesh import MeshLike
from usp.mesh.agree import gather_objects
from usp.models.files.safefile import bytes_of
from usp.models.hf.inputs import check_positions, given_positions, to_batch
from usp.models.hf.weights import WEIGHTS, WeightedCollator, checked_weights


class DealtCollator:
    """Collates one global batch in `num_parts` parts, `part_size` examples each, and puts them together.

    What comes out has explicit boundaries (cu_seqlens), whatever the collator: padded rows, one long row of
    several documents (padding-free), packed rows. The column loss_weights comes along (`WeightedCollator`).
    """

    def __init__(
        self, collate: Callable[[list[Any]], Mapping[str, Any]], num_parts: int, part_size: int
    ) -> None:
        self.collate, self.num_parts, self.part_size = WeightedCollator(collate), num_parts, part_size

    def __call__(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        parts = [list(examples[i : i + self.part_size]) for i in range(0, len(examples), self.part_size)]
        return merge([self.collate(part) for part in parts])


def merge(parts: Sequence[Mapping[str, Any]], *, pad: int = 0) -> dict[str, Tensor]:
    """Collated batches as one: rows under each other, shorter ones padded on the right.

    Raises ValueError without labels, and for what would be lost: position_ids that do not count tokens.
    """
    batches = [to_batch({**part, WEIGHTS: None}) for part in parts]
    weights = [checked_weights(p, tuple(b.tokens.shape)) for p, b in zip(parts, batches, strict=True)]
    if any(each is None for each in weights) and any(each is not None for each in weights):
        raise ValueError(f"{WEIGHTS} must be in every batch or in none, got both. Add the missing.")
    for part, batch in zip(parts, batches, strict=True):
        if part.get("shift_labels") is not None or part.get("labels") is None:
            raise ValueError(
                f"batches must hold labels, not shifted, got {sorted(part)}. Collate labels instead."
            )
        positions = given_positions(part, batch.tokens.shape)
        if positions is not None:
            check_positions(positions, batch, step=1)
    length = max(batch.tokens.shape[1] for batch in batches)
    edges, base = [0], 0
    for batch in batches:
        num_rows, seq_len = batch.tokens.shape
        for row in range(num_rows):
            inner = [0, seq_len] if batch.cu_seqlens is None else [int(e) for e in batch.cu_seqlens[row]]
            edges += [base + edge for edge in dict.fromkeys([*inner[1:], length])]
            base += length
    kept = [torch.ones_like(b.tokens, dtype=torch.bool) if b.valid is None else b.valid for b in batches]
    merged = {
        "input_ids": _stack([b.tokens for b in batches], length, pad),
        "labels": _stack([b.labels for b in batches if b.labels is not None], length, IGNORE),
        "attention_mask": _stack(kept, length, 0).long(),
        "cu_seqlens": torch.tensor(edges, dtype=torch.int32),
    }
    held = [each for each in weights if each is not None]
    return {**merged, WEIGHTS: _stack(held, length, 0)} if held else merged


def _stack(parts: Sequence[Tensor], length: int, value: int) -> Tensor:
    return torch.cat(
        [torch.nn.functional.pad(part, (0, length - part.shape[1]), value=value) for part in parts]
    )


def same_on_every_rank(dataset: Any, sampler: Any, args: Any, collate: Any, size: int) -> DataLoader[Any]:
    """A loader of `size` examples a batch that reads the same on every rank, in an order that a seed decides.

    Its length is that of the one-process run, so steps, epochs and schedules are too.
    """
    from accelerate.data_loader import prepare_data_loader

    num_workers = args.dataloader_num_workers
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=size,
        sampler=sampler,
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=False,
        drop_last=args.dataloader_drop_last,
        persistent_workers=args.dataloader_persistent_workers and num_workers > 0,
        prefetch_factor=args.dataloader_prefetch_factor,
    )
    seed = args.data_seed if args.data_seed is not None else args.seed
    prepared: DataLoader[Any] = prepare_data_loader(
        loader,
        num_processes=1,
        process_index=0,
        put_on_device=False,
        dispatch_batches=False,
        use_seedable_sampler=True,
        data_seed=seed,
    )
    return prepared


def check_same(inputs: Mapping[str, Any], mesh: MeshLike) -> None:
    """Raise ValueError, on every rank, unless all hold the same batch. 1 exchange of short strings."""
    digest = hashlib.sha256()
    for key in sorted(inputs):
        value = inputs[key]
        if isinstance(value, Tensor):
            digest.update(f"{key} {tuple(value.shape)}".encode())
            digest.update(bytes_of(value.cpu().contiguous()))
    seen = gather_objects(digest.hexdigest(), mesh)
    if len(set(seen)) > 1:
        raise ValueError(
            f"every rank must read the same global batch, got {len(set(seen))} different ones on {len(seen)} "
            f"ranks. Do not cut or shard the data set: the sequence is cut once, here."
        )
