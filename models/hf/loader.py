"""Data loaders that give every rank the same global batch, collated as each dp group collates its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from usp.mesh import MeshLike
from usp.mesh.agree import gather_objects
from usp.models.hf.inputs import merge


class DealtCollator:
    """Collates one global batch in `num_parts` parts, `part_size` examples each, and puts them together.

    What comes out has explicit boundaries (cu_seqlens), whatever the collator: padded rows, one long row of
    several documents (padding-free), packed rows.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Mapping[str, Any]], num_parts: int, part_size: int
    ) -> None:
        self.collate, self.num_parts, self.part_size = collate, num_parts, part_size

    def __call__(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        parts = [list(examples[i : i + self.part_size]) for i in range(0, len(examples), self.part_size)]
        return merge([dict(self.collate(part)) for part in parts])


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
            digest.update(value.cpu().numpy().tobytes())
    seen = gather_objects(digest.hexdigest(), mesh)
    if len(set(seen)) > 1:
        raise ValueError(
            f"every rank must read the same global batch, got {len(set(seen))} different ones on {len(seen)} "
            f"ranks. Do not cut or shard the data set: the sequence is cut once, here."
        )
