"""The module tree that holds functional parameters under Hugging Face's names, and reading it back.

Modules hold parameters only; none of them is ever called. A linear layer that PEFT has wrapped gives its
weight plus what its active adapters add.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from usp.mesh import P, Table, axis_sizes, local_slices, placements_of
from usp.mesh.dtensor import global_stride
from usp.models.config import LlamaConfig
from usp.models.files.hf_names import hf_name
from usp.models.params import Leaf, Mesh, Params, abstract, map_params, named_leaves, spec_of


class Holder(nn.Module):
    """Parameters or modules without a forward of their own."""


def build(root: nn.Module, cfg: LlamaConfig, values: Mapping[str, Tensor], table: Table, mesh: Mesh) -> None:
    """Give `root` one parameter for each leaf of the tree: q_proj and the like are nn.Linear."""
    leaves = dict(named_leaves(abstract(cfg)))
    names = {hf_name(dotted) for dotted in leaves}
    for dotted, leaf in leaves.items():
        path, _, kind = hf_name(dotted).rpartition(".")
        if kind == "weight":
            _attach(root, path, _module(path, leaf, f"{path}.bias" in names))
        spec = spec_of(table.rest, dotted, leaf, table=table.name)
        setattr(root.get_submodule(path), kind, _parameter(values[dotted], leaf.shape, spec, mesh))


def _parameter(value: Tensor, shape: tuple[int, ...], spec: P, mesh: Mesh) -> nn.Parameter:
    """Whole, or a DTensor on the axes larger than 1 alone: each more makes DTensor look at many more ways."""
    axes = tuple(axis for axis, size in axis_sizes(mesh).items() if size > 1)
    spec = P(*[tuple(axis for axis in dim if axis in axes) for dim in spec.dims])
    if not isinstance(mesh, DeviceMesh) or not spec.axes:
        return nn.Parameter(value.detach())
    mesh = mesh if len(axes) == mesh.ndim else mesh[axes]
    local = DTensor.from_local(
        value.detach(), mesh, placements_of(spec, mesh), run_check=False,
        shape=torch.Size(shape), stride=global_stride(shape),
    )  # fmt: skip
    return nn.Parameter(local)


def _module(path: str, leaf: Leaf, bias: bool) -> nn.Module:
    if len(leaf.shape) == 1:
        return Holder()
    if path.endswith("embed_tokens"):
        return nn.Embedding(leaf.shape[0], leaf.shape[1], device="meta")
    return nn.Linear(leaf.shape[1], leaf.shape[0], bias=bias, device="meta")


def _attach(root: nn.Module, path: str, module: nn.Module) -> None:
    parent_path, _, name = path.rpartition(".")
    parent = root
    for part in parent_path.split(".") if parent_path else ():
        if part not in dict(parent.named_children()):
            parent.add_module(part, Holder())
        parent = parent.get_submodule(part)
    parent.add_module(name, module)


def read(root: nn.Module, cfg: LlamaConfig, table: Table, mesh: Mesh) -> Params:
    """The parameter tree at rest: local shards, adapters added, differentiable."""

    def one(dotted: str, leaf: Leaf) -> Tensor:
        path, _, kind = hf_name(dotted).rpartition(".")
        module = _active(root.get_submodule(path), path)
        base = getattr(module, "base_layer", module)
        value: Tensor = getattr(base, kind)
        value = value.to_local(grad_placements=value.placements) if isinstance(value, DTensor) else value
        if base is module or kind != "weight":
            return value
        spec = spec_of(table.rest, dotted, leaf, table=table.name)
        for delta in _deltas(module, path):
            if tuple(delta.shape) != leaf.shape:
                raise ValueError(
                    f"{path}: adapters must have the size of the whole weight {leaf.shape}, got "
                    f"{tuple(delta.shape)}: PEFT sizes them by the shard it sees. Build the model with "
                    f"whole=True, or use usp.models.lora."
                )
            value = value + delta[local_slices(spec, leaf.shape, mesh)].to(value.dtype)
        return value

    return map_params(one, abstract(cfg))


@torch.no_grad()
def write(root: nn.Module, cfg: LlamaConfig, params: Params) -> None:
    """Copy the tree's values, this rank's shards, into the parameters."""
    for dotted, value in named_leaves(params):
        path, _, kind = hf_name(dotted).rpartition(".")
        held: Tensor = getattr(root.get_submodule(path), kind)
        (held.to_local() if isinstance(held, DTensor) else held).copy_(value)


def _active(module: nn.Module, path: str) -> nn.Module:
    """What stands in for a module that is trained whole beside adapters."""
    copies = getattr(module, "modules_to_save", None)
    if copies is None:
        return module
    names: Any = getattr(module, "active_adapters", None) or [module.active_adapter]
    if getattr(module, "disable_adapters", False) or not names:
        original: nn.Module = module.original_module  # type: ignore[assignment]
        return original
    if len(names) > 1:
        raise ValueError(f"{path} must have one active copy, got {names}. Activate one adapter.")
    copy: nn.Module = copies[names[0]]
    return copy


def _deltas(module: Any, path: str) -> list[Tensor]:
    """What each active LoRA adapter adds to the weight. ValueError for what is no sum of weights."""
    if module.disable_adapters or module.merged:
        return []
    found = []
    for name in module.active_adapters:
        if name not in getattr(module, "lora_A", {}):
            if name in getattr(module, "_available_adapters", ()):
                raise ValueError(f"{path}: adapter={name!r} must be LoRA, got {type(module).__name__}.")
            continue
        problems = [
            what
            for what, there in (
                ("lora_dropout", not isinstance(module.lora_dropout[name], nn.Identity)),
                ("a variant such as DoRA", bool(getattr(module, "lora_variant", {}).get(name))),
                ("lora_bias", bool(getattr(module, "lora_bias", {}).get(name))),
            )
            if there
        ]
        if problems:
            raise ValueError(
                f"{path}: adapter={name!r} must only add to the weight, got {', '.join(problems)}. "
                f"Configure LoRA without it."
            )
        found.append(module.get_delta_weight(name))
    return found
