"""Unified sequence parallelism: a functional core on PyTorch where the placement of every tensor is declared.

Nothing here runs at import: no process group, no environment change, no device.
"""
# ruff: noqa: E402  (the check of the checkout must come before the imports that it explains)

from pathlib import Path as _Path

for _room in ("mesh", "models", "tools"):
    if not (_Path(__file__).parent / _room).is_dir():
        raise ImportError(
            f"usp/{_room} must be a link to ../{_room} (or a folder, when installed), got a plain file: this "
            f"checkout has no symbolic links. Run: git config core.symlinks true && git checkout -- usp"
        )

from usp.attention import attention
from usp.data import Batch, Shard, shard_batch, unshard_batch
from usp.grad import value_and_grad
from usp.heads import seq_to_heads
from usp.heads_back import heads_to_seq
from usp.loss import linear_cross_entropy
from usp.optim import (
    AdamWState,
    adamw_init,
    adamw_update,
    clip_by_global_norm,
    global_norm,
    reduce_grads,
)
from usp.scan import scan

__all__ = [
    "AdamWState",
    "Batch",
    "Shard",
    "adamw_init",
    "adamw_update",
    "attention",
    "clip_by_global_norm",
    "global_norm",
    "heads_to_seq",
    "linear_cross_entropy",
    "reduce_grads",
    "scan",
    "seq_to_heads",
    "shard_batch",
    "unshard_batch",
    "value_and_grad",
]
