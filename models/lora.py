"""LoRA on the functional model (Hu et al., arXiv 2106.09685): adapters are a tree of their own.

Only adapters are differentiated, so gradients and optimizer state have their size. They are whole on every
rank; a rank's gradient is the contribution of the weights' part that it holds, summed by `reduce_grads`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from usp.mesh import P, Table, local_slices
from usp.models.config import LlamaConfig
from usp.models.files.hf_names import hf_name
from usp.models.params import (
    Leaf,
    Mesh,
    Params,
    abstract,
    leaf_name,
    map_params,
    named_leaves,
    placement,
    spec_of,
)

MATRICES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")


class Adapter(NamedTuple):
    """What is added to one weight [out, in]: scale * b @ a, a [rank, in], b [out, rank]."""

    a: Any
    b: Any


Adapters = dict[str, Adapter]
"""Adapters by the dotted name of their weight, such as "layers.0.wq"."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """`targets`: leaf names of the weights that get an adapter."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = MATRICES

    def __post_init__(self) -> None:
        unknown = sorted(set(self.targets) - set(MATRICES))
        if self.rank < 1 or not self.targets or unknown:
            raise ValueError(
                f"rank={self.rank} must be at least 1 and targets of {', '.join(MATRICES)}, got "
                f"targets={self.targets}. Change them."
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def init_lora(
    cfg: LlamaConfig,
    lora: LoraConfig,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Adapters:
    """Adapters that add nothing yet: `a` random, `b` zero. Alike on every rank; depends on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    adapters = {}
    for name, leaf in _targets(cfg, lora).items():
        bound = 1 / math.sqrt(leaf.shape[1])
        a = torch.empty(lora.rank, leaf.shape[1]).uniform_(-bound, bound, generator=generator)
        b = torch.zeros(leaf.shape[0], lora.rank)
        adapters[name] = Adapter(*(t.to(device=device, dtype=dtype) for t in (a, b)))
    return adapters


def add_lora(
    params: Params,
    adapters: Mapping[str, Adapter],
    cfg: LlamaConfig,
    lora: LoraConfig,
    *,
    table: Table | None = None,
    mesh: Mesh | None = None,
) -> Params:
    """The parameters with adapters added, at rest: what a step differentiates, and what is merged for export.

    params: this rank's shards when table and mesh are given. Differentiable; does not communicate. Raises
    ValueError for adapters that do not belong to this model.
    """
    placed = placement(table, mesh)
    leaves = _targets(cfg, lora)
    wrong = sorted(leaves.keys() ^ adapters.keys())
    wrong += [n for n in leaves.keys() & adapters.keys() if not _fits(adapters[n], leaves[n], lora)]
    if wrong:
        raise ValueError(
            f"adapters must be those of cfg and lora, got another set or shape at {', '.join(wrong[:3])}. "
            f"Make them with init_lora or load_lora of the same configuration."
        )

    def one(name: str, value: Tensor, leaf: Leaf) -> Tensor:
        if name not in adapters:
            return value
        a, b = adapters[name]
        if placed is not None:
            spec = spec_of(placed[0].rest, name, leaf, table=placed[0].name)
            rows, columns = local_slices(spec, leaf.shape, placed[1])
            a, b = a[:, columns], b[rows]
        added: Tensor = lora.scale * (b @ a)
        return value + added.to(value.dtype)

    return map_params(one, params, abstract(cfg))


def lora_specs(adapters: Mapping[str, Adapter]) -> dict[str, Adapter]:
    """Placements of adapters and their gradients: whole on every rank (for `reduce_grads` and the norm)."""
    return {name: Adapter(P(None, None), P(None, None)) for name in adapters}


def save_lora(adapters: Mapping[str, Adapter], lora: LoraConfig, path: str | os.PathLike[str]) -> None:
    """Write a directory that PEFT's `PeftModel.from_pretrained` loads. One rank calls this."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, adapter in adapters.items():
        for letter, value in zip("AB", adapter, strict=True):
            tensors[_stored(name, letter)] = value.detach().cpu().contiguous()
    modules = sorted({hf_name(name).split(".")[-2] for name in adapters})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_lora(cfg: LlamaConfig, lora: LoraConfig, path: str | os.PathLike[str]) -> Adapters:
    """Read what `save_lora`, or PEFT, wrote. ValueError when it is not what cfg and lora describe."""
    stored = load_file(Path(path) / "adapter_model.safetensors")
    adapters = {}
    for name, leaf in _targets(cfg, lora).items():
        pair = Adapter(*(stored.pop(_stored(name, letter), None) for letter in "AB"))
        if not _fits(pair, leaf, lora):
            raise ValueError(
                f"path={str(path)!r} must hold an adapter of rank={lora.rank} for {name}, and does not. "
                f"Correct rank or targets."
            )
        adapters[name] = pair
    if stored:
        raise ValueError(
            f"path={str(path)!r} must hold no other tensors, got {sorted(stored)[:3]}. Add targets."
        )
    return adapters


def _targets(cfg: LlamaConfig, lora: LoraConfig) -> dict[str, Leaf]:
    return {name: leaf for name, leaf in named_leaves(abstract(cfg)) if leaf_name(name) in lora.targets}


def _fits(adapter: Adapter, leaf: Leaf, lora: LoraConfig) -> bool:
    shapes = [None if t is None else tuple(t.shape) for t in adapter]
    return shapes == [(lora.rank, leaf.shape[1]), (leaf.shape[0], lora.rank)]


def _stored(name: str, letter: str) -> str:
    return f"base_model.model.{hf_name(name).removesuffix('.weight')}.lora_{letter}.weight"
